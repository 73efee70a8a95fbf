"""Following the changes of a database: one report for each call, and one if something may have been missed."""

from __future__ import annotations

import time
from contextlib import closing

import pytest

from kombu_couchdb.couchdb import changes as changes_module
from kombu_couchdb.couchdb.changes import Follower
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ServerUnavailable
from kombu_couchdb.outage import FIRST_PAUSE_SECONDS
from tests.conftest import PATIENCE


def test_outage_is_reported_and_attempts_become_rare(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    since, wakes = client.sequence(), list[float]()

    def away(*_: object, **__: object) -> None:
        raise ServerUnavailable('away')

    with closing(Follower(client, 'follower', lambda: wakes.append(time.monotonic()))) as follower:
        with monkeypatch.context() as patched:
            patched.setattr(changes_module, 'open_feed', away)
            for _ in range(3):
                follower.follow(since)
                changes = follower.take(PATIENCE)
                assert changes
                assert (changes.ids, changes.last) == ([], None)
        assert wakes[1] - wakes[0] >= 0.9 * FIRST_PAUSE_SECONDS
        assert wakes[2] - wakes[1] >= 1.8 * FIRST_PAUSE_SECONDS
        client.put({'_id': 'a'})
        follower.follow(since)
        changes = follower.take(PATIENCE)
        assert changes
        assert changes.ids == ['a']
