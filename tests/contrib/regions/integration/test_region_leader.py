"""The leader of a region starts its links, whatever fails at first."""

from __future__ import annotations

import threading

import pytest

from celery_couchdb.contrib.regions.link import loop
from celery_couchdb.testing import Server
from tests.conftest import wait_for
from tests.regions import regions_on


def test_leader_of_a_region_that_is_set_up_later_starts_its_links(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with regions_on(server, 'eu', 'us') as regions:
        eu = regions['eu']
        eu.regions.delete()
        leader = loop(eu.app, 1)
        leader.turn(0)
        assert 'couchdb regions setup' in caplog.text
        eu.regions.create()

        def is_started() -> bool:
            leader.turn(0.1)
            return any(thread.name == 'celery-couchdb-region-us' for thread in threading.enumerate())

        wait_for(is_started, 'the link')
        leader.close()
