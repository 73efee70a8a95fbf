"""Leases: a running consumer keeps its messages, and those of a consumer whose lease expired are redelivered."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.write_result import WriteResult
from kombu_couchdb.errors import AccessDenied
from tests.conftest import wait_for
from tests.support import Inbox, Peer, Request, items, publish, publish_many, run_python

from .conftest import Connect

#: The lease in seconds of consumers that lose it. The consumers that take over have the default lease and keep it.
LEASE = 2.0
#: The lease in seconds of consumers that must keep it, even if the machine stalls for some seconds.
LONG = 9.0


def test_long_task_is_not_redelivered_while_its_consumer_runs(connect: Connect, client: Client) -> None:
    publish(connect(), 'long')
    holder = Inbox(connect(visibility_timeout=LONG), ack=False)
    holder.wait(1)
    # Longer than the lease, the tolerance for clocks, and the pause before a sweep.
    Inbox(connect()).stays(0, LONG + 4.0)
    assert items(client)[0]['attempts'] == 1
    holder.messages[0].ack()
    wait_for(lambda: not items(client), 'the ack to be written')


def test_lease_that_was_copied_from_redis_is_logged_once(
    connect: Connect, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    for seconds in (600, 43_200, 43_200):
        inbox = Inbox(connect(visibility_timeout=seconds))
        publish(inbox.connection, seconds)
        inbox.wait(1)
    [text] = [text for text in caplog.messages if 'visibility_timeout' in text]
    assert text.startswith('visibility_timeout is 43200 s: if this process is killed, its messages wait for so long')


#: A consumer in greenlets, and a task that computes without yielding, again and again until the log says so.
BLOCKED = """
import logging, sys, time
block = time.sleep
if LIBRARY == 'gevent':
    from gevent import monkey; monkey.patch_all()
else:
    import eventlet; eventlet.monkey_patch()
from kombu import Connection, Consumer, Queue

logged = []
class Collect(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())
logging.getLogger('kombu_couchdb').addHandler(Collect())

with Connection(URL, transport_options={'visibility_timeout': 1.5}) as connection:
    with Consumer(connection, [Queue('q')], accept=['json']):
        for _ in range(30):
            block(0.7)
            time.sleep(0.2)
            if blocked := [text for text in logged if 'has blocked the event loop' in text]:
                break
print(*blocked, sep='\\n')
"""


@pytest.mark.parametrize('library', ['gevent', 'eventlet'])
def test_task_that_blocks_the_heartbeat_of_greenlets_is_logged(url: str, client: Client, library: str) -> None:
    pytest.importorskip(library)
    code = f'URL, LIBRARY = {url!r}, {library!r}\n{BLOCKED}'
    [line] = run_python(code).stdout.splitlines()
    assert f'a task has blocked the event loop of {library} for' in line
    assert 'a longer visibility_timeout than 1.5 s' in line


def test_messages_of_a_killed_consumer_are_redelivered(url: str, connect: Connect, client: Client) -> None:
    publisher = connect()
    for number in range(3):
        publish(publisher, number)
    with Peer(url, options={'visibility_timeout': LEASE}) as peer:
        assert [peer.next()['got'] for _ in range(3)] == [0, 1, 2]
        peer.signal(signal.SIGKILL)
        peer.process.wait()
        [heartbeat] = client.id_range('broker:consumer:', docs=True)
        inbox = Inbox(connect())
        assert inbox.wait(3) == [0, 1, 2]
    assert inbox.times[0] > heartbeat['doc']['expires']
    for message in inbox.messages:
        assert message.delivery_info['redelivered'] is True
        assert message.delivery_info['delivery_count'] == 2


def test_paused_consumer_notices_that_it_lost_its_lease(url: str, connect: Connect, client: Client) -> None:
    publish(connect(), 'slow')
    with Peer(url, options={'visibility_timeout': LEASE}) as peer:
        assert peer.next()['got'] == 'slow'
        peer.signal(signal.SIGSTOP)
        other = Inbox(connect(), ack=False)
        assert other.wait(1) == ['slow']
        peer.signal(signal.SIGCONT)
        peer.tell('ack')
        assert peer.next() == {'done': 'ack'}
        wait_for(lambda: any('lost its lease' in line for line in peer.log), 'the log line about the lost lease')
        wait_for(
            lambda: any('held any more' in line or 'lost its claim' in line for line in peer.log),
            'the log line about the late ack',
        )
        [item] = items(client)
        assert item['claimed']['by'] == other.connection.transport.consumer.id
        other.messages[0].ack()
        wait_for(lambda: not items(client), 'the ack of the new holder')
        other.consumer.cancel()
        publish(connect(), 'next')
        assert peer.next()['got'] == 'next'  # it goes on with a new lease


def test_consumers_that_were_paused_together_keep_their_leases(url: str, client: Client, connect: Connect) -> None:
    """A machine slept: none of its consumers counts the time as silence of the others."""
    publish(connect(), 'slow')
    options = {'visibility_timeout': 6.0, 'request_timeout': 5.0, 'connect_timeout': 5.0}
    with Peer(url, options=options) as peer:
        assert peer.next()['got'] == 'slow'
        with Peer(url, options=options) as other:
            wait_for(lambda: len(client.id_range('broker:consumer:')) == 2, 'the second consumer')
            [before] = items(client)
            peer.signal(signal.SIGSTOP)
            time.sleep(5.0)  # shorter than the lease, and long enough for a sweep to see the last heartbeat
            other.signal(signal.SIGSTOP)
            time.sleep(10.0)  # longer than the lease and the tolerance for clocks
            other.signal(signal.SIGCONT)
            time.sleep(0.5)  # the other one sweeps first
            peer.signal(signal.SIGCONT)
            heartbeat = client.get(before['claimed']['by'])
            wait_for(lambda: client.get(heartbeat['_id'])['_rev'] != heartbeat['_rev'], 'a heartbeat')
            peer.tell('ack')
            assert peer.next() == {'done': 'ack'}
            wait_for(lambda: not items(client), 'the ack')
            assert not [line for line in [*peer.log, *other.log] if 'lease' in line]


def test_one_heartbeat_for_any_number_of_messages(connect: Connect, client: Client, sent: list[Request]) -> None:
    publish_many(connect(), range(50))
    inbox = Inbox(connect(visibility_timeout=3.0), ack=False)
    inbox.wait(50)
    wait_for(lambda: sent and sent[-1].is_heartbeat, 'all claims to be written')
    started = time.monotonic()
    sent.clear()
    wait_for(lambda: sum(request.is_heartbeat for request in sent) >= 4, 'four heartbeats')
    assert time.monotonic() - started > 2.5
    writing = [request for request in sent if request.docs]
    assert all(len(request.docs) == 1 for request in writing)
    assert all(request.is_heartbeat for request in writing)
    assert [item['_rev'].partition('-')[0] for item in items(client)] == ['2'] * 50


def test_consumer_writes_a_heartbeat_before_its_first_claim_and_leaves_none(
    connect: Connect, client: Client, sent: list[Request]
) -> None:
    publish(connect(), 'hello')
    inbox = Inbox(connect())
    inbox.wait(1)
    info = inbox.messages[0].delivery_info
    assert (info['redelivered'], info['delivery_count']) == (False, 1)
    assert client.id_range('broker:consumer:')
    inbox.connection.release()
    assert not client.id_range('broker:consumer:')
    writes = [doc.get('type', 'deletion') for request in sent for doc in request.docs if request.path != '/']
    assert writes.index('Consumer') < len(writes) - 1 - writes[::-1].index('WorkItem')


@pytest.mark.parametrize('beat', [0, 2], ids=['first', 'later'])
def test_refused_heartbeat_raises_and_releases_the_messages(
    connect: Connect, client: Client, monkeypatch: pytest.MonkeyPatch, beat: int
) -> None:
    """A `validate_doc_update` function may refuse heartbeats. Claims without a lease must not follow."""
    publisher, connection = connect(), connect(visibility_timeout=LEASE)
    publish(publisher, 'hello')
    transport = connection.transport
    bulk, beats = transport.couchdb.bulk, list[Document]()

    def bulk_and_refuse(docs: Sequence[Document], **options: Any) -> list[WriteResult]:
        beats.extend(doc for doc in docs if doc.get('type') == 'Consumer')
        return [
            WriteResult.refused(result.id, 'forbidden', 'no heartbeats here')
            if result.id.startswith('broker:consumer:') and len(beats) > beat
            else result
            for result in bulk(docs, **options)
        ]

    monkeypatch.setattr(transport.couchdb, 'bulk', bulk_and_refuse)
    inbox = Inbox(connection, ack=False)
    with pytest.raises(AccessDenied, match='no heartbeats here'):
        inbox.wait(2)
    assert len(inbox.messages) == (1 if beat else 0)
    assert len(beats) == beat + 1
    wait_for(lambda: [(item['claimed'], item['attempts']) for item in items(client)] == [(None, 0)], 'the release')
