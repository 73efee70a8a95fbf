"""The server stops, is killed or hangs. The embedded server loses its data when it restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu import Connection

from celery_couchdb.testing import Server
from kombu_couchdb.embedded import EmbeddedServer
from tests.conftest import wait_for
from tests.patience import PatientConnection
from tests.support import Inbox, publish, release_all

from .test_network import complaints


@pytest.fixture
def reach(own_server: EmbeddedServer) -> Iterator[Callable[..., Connection]]:
    """A function that connects to the server of this test."""
    opened: list[Connection] = []

    def reach(**options: Any) -> Connection:
        opened.append(PatientConnection(Server(own_server.url).couchdb_url('celery'), transport_options=options))
        return opened[-1]

    yield reach
    release_all(opened)


@pytest.mark.parametrize('kill', [False, True], ids=['stopped', 'killed'])
def test_consumer_resumes_after_a_server_restart(
    own_server: EmbeddedServer, reach: Callable[..., Connection], caplog: pytest.LogCaptureFixture, kill: bool
) -> None:
    inbox = Inbox(reach())
    publish(reach(), 'before')
    inbox.wait(1)
    own_server.stop(kill)
    inbox.drain_until(lambda: complaints(caplog), 'the consumer to notice the failure')
    own_server.start()
    publish(reach(), 'after')
    inbox.wait(2)
    assert len(complaints(caplog)) == 1


def test_messages_published_after_a_restart_under_load_are_delivered(
    own_server: EmbeddedServer, reach: Callable[..., Connection]
) -> None:
    inboxes = [Inbox(reach(), prefetch=4) for _ in range(3)]
    publisher = reach()
    for number in range(100):
        publish(publisher, number)
    inboxes[0].wait(1)
    own_server.stop(kill=True)
    own_server.start()
    for number in range(100, 130):
        publish(publisher, number, retry=True, retry_policy={'max_retries': None, 'interval_start': 0.2})
    wanted = set(range(100, 130))

    def got() -> set[int]:
        for inbox in inboxes:
            inbox.drain(0.05)
        return {body for inbox in inboxes for body in inbox.bodies}

    wait_for(lambda: wanted <= got(), 'the messages published after the restart')
