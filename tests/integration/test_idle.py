"""What a consumer asks of the server while there is nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable

from kombu import Connection, Exchange, Queue

from kombu_couchdb.couchdb.client import Client
from tests.support import Inbox, Request, publish

#: How long the consumer is watched, in seconds; and for how long it is quiet when it has settled down before.
WATCHED, SETTLING = 20.0, 3.0


def test_idle_consumer_is_quiet(connect: Callable[..., Connection], client: Client, sent: list[Request]) -> None:
    """By promise two requests a minute beside the heartbeat, with a busy moment before, several queues and a broadcast."""
    inbox = Inbox(connect(), Queue('one'), Queue('two'), Queue('pidbox', Exchange('pidbox', type='fanout')))
    publish(connect(), 'hello', 'one')
    inbox.wait(1)
    inbox.drain_until(lambda: sent[-1].at < time.monotonic() - SETTLING, 'it to settle down')
    sent.clear()
    began = time.monotonic()
    inbox.stays(1, WATCHED)
    minutes = (time.monotonic() - began) / 60
    others = [request for request in sent if not request.is_heartbeat]
    assert len(others) <= 2 * minutes + 1, others
    # Every third of the visibility timeout of 60 seconds.
    assert len(sent) - len(others) <= 3 * minutes + 1
    publish(connect(), 'still awake', 'two')
    assert inbox.wait(2)[1] == 'still awake'
