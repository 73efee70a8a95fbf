"""The server is killed, and loses its data, as the embedded server does."""

from __future__ import annotations

from celery_couchdb.testing import Server
from kombu_couchdb.embedded import EmbeddedServer
from tests.conftest import wait_for
from tests.patience import PatientConnection
from tests.support import Inbox, publish, publish_many, release_all


def test_messages_published_after_a_restart_under_load_are_delivered() -> None:
    with EmbeddedServer() as server:
        url = Server(server.url).couchdb_url('celery')
        publisher, *consumers = (PatientConnection(url) for _ in range(4))
        inboxes = [Inbox(connection, prefetch=4) for connection in consumers]
        publish_many(publisher, range(100))
        inboxes[0].wait(1)
        server.stop(kill=True)
        server.start()
        for number in range(100, 130):
            publish(publisher, number, retry=True, retry_policy={'max_retries': None, 'interval_start': 0.2})
        wanted = set(range(100, 130))

        def got() -> set[int]:
            for inbox in inboxes:
                inbox.drain(0.05)
            return {body for inbox in inboxes for body in inbox.bodies}

        wait_for(lambda: wanted <= got(), 'the messages published after the restart')
        release_all([publisher, *consumers])
