"""The requests of an idle consumer."""

from __future__ import annotations

import time

import pytest
from kombu import Exchange, Queue

from kombu_couchdb.couchdb.client import Client
from tests.support import Inbox, Request, publish

from .conftest import Connect

#: How long the consumer is watched, and how long it must have been quiet before that, in seconds.
WATCHED, SETTLING = 20.0, 3.0


@pytest.mark.slow
def test_idle_consumer_sends_few_requests(connect: Connect, client: Client, sent: list[Request]) -> None:
    """At most two requests a minute besides heartbeats, after some work, with several queues and a broadcast."""
    inbox = Inbox(connect(), Queue('one'), Queue('two'), Queue('pidbox', Exchange('pidbox', type='fanout')))
    publish(connect(), 'hello', 'one')
    inbox.wait(1)
    inbox.drain_until(lambda: sent[-1].at < time.monotonic() - SETTLING, 'the consumer to become quiet')
    sent.clear()
    began = time.monotonic()
    inbox.stays(1, WATCHED)
    minutes = (time.monotonic() - began) / 60
    others = [request for request in sent if not request.is_heartbeat]
    assert len(others) <= 2 * minutes + 1, others
    # A heartbeat every third of the visibility timeout of 60 seconds.
    assert len(sent) - len(others) <= 3 * minutes + 1
    publish(connect(), 'still awake', 'two')
    assert inbox.wait(2)[1] == 'still awake'
