"""An outage longer than the lease: when the server responds again, all consumers keep their messages."""

from __future__ import annotations

import time
from collections.abc import Callable

from kombu import Connection

from kombu_couchdb.couchdb.client import Client
from tests.chaos.proxy import Proxy
from tests.conftest import wait_for
from tests.support import Inbox, items, publish, publish_many

#: The lease of all consumers in seconds, and time limits of requests that fit it.
LEASE = 12.0
QUICK = {'request_timeout': 2.0, 'connect_timeout': 1.0}


def test_consumers_keep_their_messages_after_an_outage_longer_than_the_lease(
    connect: Callable[..., Connection], proxy: Proxy, client: Client
) -> None:
    publish_many(connect(), range(5))
    inboxes = [
        Inbox(connect(through_proxy=True, visibility_timeout=LEASE, **QUICK), ack=False, prefetch=1) for _ in range(5)
    ]
    for inbox in inboxes:
        inbox.wait(1)

    def beats() -> dict[str, float]:
        return {row['id']: row['doc']['date'] for row in client.id_range('broker:consumer:', docs=True)}

    held, before = {item['_id']: item['claimed'] for item in items(client)}, beats()
    proxy.hang()
    hung = time.monotonic()
    publish(connect(), 'meanwhile')
    wait_for(lambda: time.monotonic() - hung > LEASE + 3.0, 'the leases to expire')
    proxy.go_on()
    # If the first consumer to return swept the others, their messages would be claimed again.
    back = time.time()
    wait_for(
        lambda: len(beats()) == 5 and min(beats().values()) > back + LEASE,
        'heartbeats of all consumers for the length of a lease',
    )
    assert {item['_id']: item['claimed'] for item in items(client) if item['claimed']} == held
    assert beats().keys() == before.keys()
    for inbox in inboxes:
        assert len(inbox.messages) == 1
        inbox.messages[0].ack()
    wait_for(lambda: len(items(client)) == 1, 'the acks to be written')

    def received() -> list[str]:
        for inbox in inboxes:
            inbox.drain(0.05)
        return [body for inbox in inboxes for body in inbox.bodies if body == 'meanwhile']

    assert wait_for(received, 'the message published during the outage') == ['meanwhile']
