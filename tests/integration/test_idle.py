"""What a consumer asks of the server while there is nothing to do."""

from __future__ import annotations

from collections.abc import Callable

from kombu import Connection, Exchange, Queue

from kombu_couchdb.client import Client
from tests.support import Inbox, Request, publish

#: How long the consumer is watched, in seconds; and how long it may take to settle down before.
WATCHED, SETTLING = 20.0, 3.0


def test_idle_consumer_is_quiet(connect: Callable[..., Connection], client: Client, sent: list[Request]) -> None:
    """By promise two requests a minute beside the heartbeat, with a busy moment before, several queues and a broadcast."""
    inbox = Inbox(connect(), Queue('one'), Queue('two'), Queue('pidbox', Exchange('pidbox', type='fanout')))
    publish(connect(), 'hello', 'one')
    inbox.wait(1)
    inbox.stays(1, SETTLING)
    sent.clear()
    inbox.stays(1, WATCHED)
    others = [request for request in sent if not request.is_heartbeat]
    assert len(others) <= 1, others
    # Every third of the visibility timeout of 60 seconds.
    assert len(sent) - len(others) <= WATCHED / 20 + 1
    publish(connect(), 'still awake', 'two')
    assert inbox.wait(2)[1] == 'still awake'
