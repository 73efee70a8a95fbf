"""Limits of tasks with one key: how many are delivered at a time, each with a slot, and in a period, each with a start.

A message over its limit is parked: it waits in the database until a slot is free, or its start is due.
"""

from __future__ import annotations

import random
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery
from kombu import Connection

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import workitem
from kombu_couchdb.errors import ConfigurationError
from kombu_couchdb.limits.gate import ParkedMessages
from kombu_couchdb.queues.store import Store
from tests.chaos.proxy import Proxy
from tests.conftest import PATIENCE, wait_for
from tests.patience import PatientConnection
from tests.support import Inbox, Peer, Request, eta, items, publish, publish_many

from .conftest import Connect
from .test_keep_done import DAY, kept


def limited(key: str = 'k', limit: Any = 1, **headers: Any) -> dict[str, Any]:
    """Return the options of a message with a limit."""
    return {'headers': {'concurrency_key': key, 'concurrency_limit': limit, **headers}}


def rated(rate: Any = '5/h', key: Any = 'k', **headers: Any) -> dict[str, Any]:
    """Return the options of a message with a rate."""
    return {'headers': {'rate_key': key, 'rate': rate, **headers}}


def slots(client: Client) -> list[str]:
    """Return the ids of the slots that are taken."""
    return [row['id'] for row in client.id_range('slot:')]


def parked(client: Client) -> list[Any]:
    """Return the messages that wait."""
    return sorted(doc['message']['body'] for doc in items(client) if doc.get('parked'))


def document(client: Client) -> dict[str, Any]:
    """Return the document of the rate key."""
    return client.get('rate:k')


def now_due(client: Client) -> None:
    """Set the time of the next start to now, as if the time had passed. The last start was another consumer's."""
    client.put({**document(client), 'next': client.clock.now(), 'by': 'broker:consumer:other'})


#: Messages of one key of which one is delivered, until it is acknowledged or for twelve minutes.
each_limit = pytest.mark.parametrize('options', [limited(), rated()], ids=['slot', 'start'])


# -- slots and starts


@each_limit
def test_message_over_its_limit_takes_no_prefetch_and_blocks_nobody(
    connect: Connect, client: Client, options: dict[str, Any]
) -> None:
    connection = connect()
    publish_many(connection, [f'k{number}' for number in range(30)], **options)
    of_another_key = {name: 'é:0' if name.endswith('key') else value for name, value in options['headers'].items()}
    publish(connection, 'other key', headers=of_another_key)
    publish(connection, 'no key')
    inbox = Inbox(connect(), ack=False, prefetch=3)
    assert sorted(inbox.wait(3)) == ['k0', 'no key', 'other key']
    inbox.stays(3, 0.5)


@each_limit
def test_basic_get(connect: Connect, client: Client, options: dict[str, Any]) -> None:
    """It looks past the messages over their limit."""
    connection = connect()
    publish_many(connection, range(30), **options)
    publish(connection, 'no key')
    channel = connect().channel()
    first = channel.basic_get('q')
    assert [first.decode(), channel.basic_get('q').decode()] == [0, 'no key']
    assert channel.basic_get('q') is None
    assert len(parked(client)) == 29
    if 'rate' in options['headers']:
        publish_many(connection, [1, 2], **rated('1/s', 'l'))  # the second one waits for its start
    else:
        first.ack()
    assert wait_for(lambda: channel.basic_get('q')).decode() == 1
    assert 'rate' not in options['headers'] or wait_for(lambda: channel.basic_get('q')).decode() == 2


@pytest.mark.parametrize('options', [limited(), rated('1/s')], ids=['slot', 'start'])
def test_killed_consumer(connect: Connect, client: Client, url: str, options: dict[str, Any]) -> None:
    """Its slot is free when its lease has ended, and its start is lost. Another one goes on with what it has parked."""
    publish_many(connect(visibility_timeout=2), ['a', 'b', 'c'], **options)
    with Peer(url, options={'visibility_timeout': 2}) as peer:
        assert peer.next()['got'] == 'a'
        wait_for(lambda: parked(client))
        peer.signal(signal.SIGKILL)
    before = client.get_or_none('rate:k')
    assert sorted(Inbox(connect(visibility_timeout=2)).wait(3)) == ['a', 'b', 'c']
    wait_for(lambda: not items(client) and not slots(client))
    assert before is None or document(client)['next'] >= before['next'] + 3 * 1.1 - 0.1


def test_wrong_limits_are_refused(connection: Connection) -> None:
    for wrong, sentence in (
        (rated('10/d'), 'the header rate must be a rate from one a day to 1,000 a second'),
        (rated(key=7), 'the header rate_key must be text of 1 to 500 characters'),
        ({'headers': {'concurrency_key': 'rate:x', 'concurrency_limit': 1}}, "must not begin with 'rate:'"),
        ({'headers': {'concurrency_key': 'k', 'concurrency_limit': 0}}, 'concurrency_limit must be'),
        ({'headers': {'concurrency_key': 'k'}}, 'concurrency_limit must be'),
        ({'headers': {'concurrency_limit': 2}}, 'concurrency_limit needs the header concurrency_key'),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            publish(connection, 'a', **wrong)


def test_malformed_limit_becomes_a_dead_letter(connect: Connect, client: Client) -> None:
    publish(connect(), 'a', **limited())
    publish(connect(), 'b', **rated())
    docs, names = items(client), ['concurrency_limit', 'rate']
    for doc, name in zip(docs, names, strict=True):
        doc['message']['headers'][name] = 'many'
    client.bulk(docs)
    Inbox(connect()).drain_until(lambda: all(doc.get('status') for doc in items(client)))
    for dead, name in zip(items(client), names, strict=True):
        assert dead['reason'].startswith(f'malformed: the header {name} must be')


def test_no_requests_about_limits_without_limits(connect: Connect, client: Client, sent: list[Request]) -> None:
    publish_many(connect(), range(10), headers={'rate': 'a header of the program'})
    sent.clear()
    Inbox(connect(visibility_timeout=2)).wait(10)
    wait_for(lambda: not items(client))
    assert sent
    assert not [each for each in sent if re.search('slot|rate:|rate%3A|parked', f'{each.path} {each.body}')]


# -- slots


def test_messages_of_one_key_are_delivered_one_after_the_other(connect: Connect, client: Client) -> None:
    """A slot that is free goes to the highest priority, then to the oldest message."""
    publish_many(connect(), ['a', 'b', 'c'], **limited())
    inbox = Inbox(connect(), ack=False)
    assert inbox.wait(1) == ['a']
    publish(connect(), 'important', priority=9, **limited())
    inbox.drain_until(lambda: len(parked(client)) == 3, 'the others to be parked')
    inbox.stays(1, 0.3)
    assert slots(client) == ['slot:k:0']
    for number, name in enumerate(['important', 'b', 'c']):
        inbox.messages[number].ack()
        assert inbox.wait(number + 2)[-1] == name
    inbox.messages[3].ack()
    wait_for(lambda: not items(client) and not slots(client), 'the slot to be freed')


def test_limit_of_several_consumers(connect: Connect, client: Client) -> None:
    publish_many(connect(), range(20), **limited(limit=3))
    inboxes = [Inbox(connect(), ack=False) for _ in range(3)]
    done = 0
    while done < 20:
        wait_for(lambda: any(len(inbox.drain(0.05).messages) for inbox in inboxes))
        held = [(inbox, message) for inbox in inboxes for message in inbox.messages]
        assert len(held) <= 3
        assert len(slots(client)) <= 3
        inbox, message = random.choice(held)
        inbox.messages.remove(message)
        message.ack()
        done += 1
    wait_for(lambda: not items(client) and not slots(client))


def test_slots_of_a_lost_lease_are_not_used_again(connect: Connect, client: Client, url: str) -> None:
    """After an outage a consumer does not claim with a slot that another consumer has taken meanwhile."""
    address, options = client.address, {'visibility_timeout': 2}
    publish(connect(**options), 'a', **limited())
    with Proxy(address.host, address.port) as proxy:
        behind = url.replace(f':{address.port}/', f':{proxy.port}/')
        with PatientConnection(behind, transport_options=options) as connection:
            channel = connection.channel()
            assert channel.basic_get('q').decode() == 'a'
            proxy.refuse()
            publish(connect(**options), 'x', to='other', **limited())
            assert Inbox(connect(**options), 'other', ack=False).wait(1) == ['x']
            with ThreadPoolExecutor() as executor:
                found = executor.submit(channel.basic_get, 'q')
                wait_for(lambda: channel.connection.unacked.pulls, 'the consumer to be asked for a message')
                proxy.restore()
                assert found.result(PATIENCE) is None
    assert len(slots(client)) == 1


def test_messages_over_the_limit_are_parked_together(connect: Connect, client: Client, sent: list[Request]) -> None:
    """A consumer with little credit reaches what is behind them after few requests."""
    connection = connect()
    publish(connection, 'x', to='first', **limited())
    blocker = Inbox(connect(), 'first', ack=False)
    assert blocker.wait(1) == ['x']
    publish_many(connection, range(150), **limited())
    publish(connection, 'no key')
    sent.clear()
    assert Inbox(connect(), ack=False, prefetch=1).wait(1) == ['no key']
    assert len(parked(client)) == 150
    assert len([request for request in sent if any(doc.get('parked') for doc in request.docs)]) < 20


def test_queues_share_a_key(connect: Connect, client: Client) -> None:
    """The consumer that frees the slot does not consume the queue of the message that waits."""
    connection = connect()
    one, other = Inbox(connect(), 'one', ack=False), Inbox(connect(), 'other', ack=False)
    publish(connection, 'a', to='one', **limited())
    one.wait(1)
    publish(connection, 'b', to='other', **limited())
    other.drain_until(lambda: parked(client))
    one.messages[0].ack()
    assert other.wait(1) == ['b']


def test_consumer_without_credit_wakes_another(connect: Connect, client: Client) -> None:
    connection = connect()
    busy = Inbox(connect(), ack=False, prefetch=2)
    publish(connection, 'a', **limited())
    publish(connection, 'x')
    busy.wait(2)
    idle = Inbox(connect(), ack=False)
    publish(connection, 'b', **limited())
    idle.drain_until(lambda: parked(client))
    busy.channel.basic_qos(0, 1, False)  # so that it has no credit when it frees the slot
    next(message for message in busy.messages if message.decode() == 'a').ack()
    assert idle.wait(1) == ['b']


@pytest.mark.parametrize('how', ['requeue', 'reject', 'cancel and close'])
def test_other_ends_of_a_message_free_its_slot(connect: Connect, client: Client, how: str, hooks: Any) -> None:
    publish_many(connect(), ['a', 'b'], **limited(id='t', task='task'))
    inbox = Inbox(connect(), ack=False)
    inbox.wait(1)
    if how == 'requeue':
        inbox.messages[0].requeue()
        assert inbox.wait(2)[1] in ('a', 'b')
    elif how == 'reject':
        inbox.messages[0].reject()
        assert inbox.wait(2) == ['a', 'b']
    else:
        other = Inbox(connect(), ack=True)
        hooks.while_running(lambda task_id: False)
        inbox.connection.close()
        assert sorted(other.wait(2)) == ['a', 'b']
        wait_for(lambda: not slots(client))


def test_slot_of_a_task_that_may_run_is_kept_until_the_lease_ends(connect: Connect, client: Client, hooks: Any) -> None:
    hooks.while_running(lambda task_id: True)
    publish_many(connect(), ['a', 'b'], **limited(id='t', task='task'))
    inbox = Inbox(connect(visibility_timeout=3), ack=False)
    inbox.wait(1)
    other = Inbox(connect(visibility_timeout=3))
    inbox.connection.close()
    assert slots(client)
    other.stays(0, 1)
    assert sorted(other.wait(2)) == ['a', 'b']


def test_lost_wakeup_is_found_by_a_sweep(connect: Connect, client: Client) -> None:
    publish(connect(), 'a', **limited(limit=2))
    [doc] = items(client)
    client.bulk([{**doc, 'parked': {'key': 'k', 'date': 1}}])
    assert Store(client).leases()['parked'].popitem()[1]['count'] == 1
    assert Inbox(connect(visibility_timeout=2)).wait(1) == ['a']


def test_longest_key(connect: Connect, client: Client) -> None:
    """An encoded key can be longer than a URL may be."""
    key = 500 * '\U0001f600'
    publish_many(connect(), ['a', 'b', 'c'], **limited(key, limit=2))
    inbox = Inbox(connect(), ack=False)
    inbox.wait(2)
    inbox.drain_until(lambda: len(parked(client)) == 1)
    assert len(slots(client)) == 2
    assert ParkedMessages(client).keys(10, None) == [key]
    assert ParkedMessages(client).keys(10, key) == []
    inbox.messages[0].ack()
    inbox.wait(3)


def test_due_dates_and_counts(connect: Connect, client: Client) -> None:
    connection = connect()
    inbox = Inbox(connect(), ack=False)
    publish(connection, 'now', **limited())
    inbox.wait(1)
    publish(connection, 'soon', **limited(**eta(0.2)))
    inbox.drain_until(lambda: parked(client))
    assert connection.channel().queue_declare('q', passive=True).message_count == 1
    inbox.messages[0].ack()
    assert inbox.wait(2) == ['now', 'soon']
    publish(connection, 'x', **limited())
    inbox.drain_until(lambda: parked(client))
    assert connection.channel().queue_purge('q') == 1
    assert not parked(client)


def test_unique_job(connect: Connect, client: Client) -> None:
    """A message behind a running unique job takes its slot."""
    connection = connect()
    inbox = Inbox(connect(), ack=False)
    for name in ('a', 'b'):
        publish(connection, name, **limited(id=name, task='t', job_key='j'))
        inbox.wait(1)
    publish(connection, 'other', **limited())
    inbox.drain_until(lambda: parked(client))
    for number in range(3):
        inbox.wait(number + 1)
        assert len(slots(client)) == 1
        inbox.messages[number].ack()
    assert sorted(inbox.bodies) == ['a', 'b', 'other']
    wait_for(lambda: not items(client) and not slots(client))


# -- different limits of one key


def ack(inbox: Inbox, body: Any) -> None:
    next(message for message in inbox.messages if message.decode() == body).ack()


def test_lower_limit_does_not_hold_back_a_higher_one(connect: Connect, client: Client) -> None:
    """A slot that the older message with the lower limit cannot use is for the one behind it."""
    connection = connect()
    inbox = Inbox(connect(), ack=False)
    publish(connection, 'in slot 0', **limited(limit=1))
    inbox.wait(1)
    publish(connection, 'in slot 1', **limited(limit=2))
    inbox.wait(2)
    publish(connection, 'low', **limited(limit=1))
    publish_many(connection, ['high', 'high, too'], **limited(limit=2))
    inbox.drain_until(lambda: len(parked(client)) == 3)
    ack(inbox, 'in slot 1')
    assert inbox.wait(3)[-1] == 'high'
    assert slots(client) == ['slot:k:0', 'slot:k:1']
    ack(inbox, 'in slot 0')
    assert inbox.wait(4)[-1] == 'low'
    ack(inbox, 'high')
    assert inbox.wait(5)[-1] == 'high, too'


def test_message_for_a_slot_is_found_behind_many_with_lower_limits(
    connect: Connect, client: Client, sent: list[Request]
) -> None:
    publish_many(connect(), range(60), **limited(limit=2))
    publish(connect(), 'high', **limited(limit=4))
    now = client.clock.now()
    client.bulk([{**doc, 'parked': {'key': 'k', 'date': now}} for doc in items(client)])
    sent.clear()
    [(key, number, doc)] = ParkedMessages(client).for_slots({'k': {3}})
    assert (key, number, doc and doc['message']['body']) == ('k', 3, '"high"')
    assert len(sent) <= 6


def test_sweep_wakes_a_message_behind_one_with_a_lower_limit(connect: Connect, client: Client) -> None:
    holder = Inbox(connect(visibility_timeout=2), ack=False)
    publish(connect(), 'holder', **limited(limit=1))
    holder.wait(1)
    publish(connect(), 'low', to='other', **limited(limit=1))
    publish(connect(), 'high', to='other', **limited(limit=2))
    client.bulk([{**doc, 'parked': {'key': 'k', 'date': 1}} for doc in items(client) if doc['queue'] == 'other'])
    assert Inbox(connect(visibility_timeout=2), 'other', ack=False).wait(1) == ['high']
    assert parked(client) == ['"low"']


# -- starts


def dates_of(client: Client, count: int, inboxes: list[Inbox]) -> list[float]:
    """Wait for so many messages that are held; return the dates of their claims, which consumers wrote, sorted."""

    def held() -> list[Any]:
        for inbox in inboxes:
            inbox.drain(0.02)
        return [doc for doc in items(client) if doc['claimed']]

    wait_for(lambda: len(held()) == count, f'{count} messages to be claimed')
    return sorted(doc['claimed']['date'] for doc in held())


def test_consumers_together_do_not_exceed_the_rate(connect: Connect, client: Client) -> None:
    publish_many(connect(), range(20), **rated('10/s'))
    inboxes = [Inbox(connect(), ack=False) for _ in range(2)]
    dates = dates_of(client, 20, inboxes)
    # A claim is dated after its start was stored, which can take a moment; so the distance of two claims can be shorter
    # by that moment than the distance of their starts.
    assert min(late - early for early, late in zip(dates, dates[10:], strict=False)) > 0.5
    # Whatever a request takes: the starts themselves are stored with their distances.
    assert document(client)['next'] - dates[0] >= 19 * 0.11 - 0.1


def test_a_task_that_has_expired_takes_no_start(connect: Connect, client: Client) -> None:
    """It is delivered for Celery to revoke."""
    expiring = rated('1/h', id='a', expires='2030-01-01T00:00:00+00:00')
    publish_many(connect(), range(5), expiration=0.001, **expiring)
    publish_many(connect(), ['first', 'second'], **rated('1/h'))
    inbox = Inbox(connect(), ack=False)
    assert sorted(map(str, inbox.wait(6))) == ['0', '1', '2', '3', '4', 'first']
    wait_for(lambda: parked(client) == ['"second"'], 'the other message to wait')


def test_priority_and_age_decide_who_is_next(connect: Connect, client: Client) -> None:
    connection = connect()
    inbox = Inbox(connect(), ack=False)
    publish(connection, 'first', **rated())
    inbox.wait(1)
    publish(connection, 'old', **rated('2/s'))
    publish(connection, 'new', **rated('2/s'))
    publish(connection, 'important', priority=9, **rated('2/s'))
    inbox.drain_until(lambda: len(parked(client)) == 3)
    now_due(client)
    other = Inbox(connect(visibility_timeout=2), ack=False)
    assert other.wait(3) == ['important', 'old', 'new']


def test_concurrency_limit_and_rate(connect: Connect, client: Client) -> None:
    """A message needs both. While it has no start, it holds no slot."""
    inbox = Inbox(connect(), ack=False)
    publish_many(connect(), range(4), **rated('5/s', concurrency_key='c', concurrency_limit=2))
    inbox.wait(2)
    inbox.stays(2, 1.0)
    for number in range(4):
        inbox.wait(min(4, number + 2))
        inbox.messages[number].ack()
    assert sorted(inbox.wait(4)) == [*range(4)]
    wait_for(lambda: not items(client) and not client.id_range('slot:'))
    publish_many(connect(), ['a', 'b'], **rated(key='l', concurrency_key='c', concurrency_limit=2))
    inbox.wait(5)
    inbox.drain_until(lambda: len(parked(client)) == 1)
    assert len(client.id_range('slot:')) == 1


def test_a_requeued_message_needs_another_start(connect: Connect, client: Client) -> None:
    publish(connect(), 'a', **rated())
    inbox = Inbox(connect(), ack=False)
    inbox.wait(1)
    inbox.messages[0].requeue()
    inbox.drain_until(lambda: parked(client))
    inbox.stays(1, 0.3)


@pytest.mark.parametrize('malformed', [{'type': 'Rate', 'next': 'soon'}, {'type': 7, 'next': 1e300}])
def test_malformed_document_is_replaced(connect: Connect, client: Client, malformed: dict[str, Any]) -> None:
    client.put({'_id': 'rate:k', **malformed})
    publish_many(connect(), ['a', 'b'], **rated())
    inbox = Inbox(connect(), ack=False)
    assert inbox.wait(1) == ['a']
    inbox.drain_until(lambda: len(parked(client)) == 1)
    assert 600 < document(client)['next'] - client.clock.now() < 800


def test_nothing_is_polled_while_messages_wait(connect: Connect, client: Client, sent: list[Request]) -> None:
    publish_many(connect(), range(10), **rated())
    inbox = Inbox(connect(), ack=False)
    inbox.wait(1)
    inbox.drain_until(lambda: len(parked(client)) == 9)
    inbox.drain(1.0)
    sent.clear()
    inbox.drain(2.0)
    assert not [request for request in sent if re.search('rate|parked', f'{request.path} {request.body}')]


# -- completed messages that are kept


def kept_ids(client: Client) -> list[str | None]:
    """Return the ids of the tasks whose messages are kept."""
    return [workitem.task_id(doc) for doc in kept(client)]


@pytest.mark.parametrize('more', [{}, rated()['headers']], ids=['slot', 'slot and rate'])
def test_one_request_keeps_the_message_and_frees_its_slot(
    app: Celery, connect: Connect, client: Client, sent: list[Request], more: dict[str, Any]
) -> None:
    app.send_task('report', **limited(**more))
    [item] = items(client)
    inbox = Inbox(connect(keep_done=DAY), 'celery', ack=False)
    inbox.wait(1)
    assert slots(client) == ['slot:k:0']
    starts = [row['id'] for row in client.id_range('rate:')]
    assert starts == (['rate:k'] if more else [])
    del sent[:]
    inbox.messages[0].ack()
    wait_for(lambda: kept(client), 'the acknowledgement')
    [written] = [
        {doc['_id']: doc.get('status') or doc.get('_deleted') for doc in request.docs}
        for request in sent
        if any(doc.get('type') == 'DoneItem' for doc in request.docs)
    ]
    assert written == {item['_id']: 'done', 'slot:k:0': True}
    assert not any('rate:k' in str(request.body) for request in sent)
    assert not slots(client)


def test_message_that_waited_for_the_slot_of_a_kept_one(app: Celery, connect: Connect, client: Client) -> None:
    ids = [app.send_task('report', **limited()).id for _ in range(3)]
    inbox = Inbox(connect(keep_done=DAY), 'celery', ack=False)
    for number in range(3):
        inbox.wait(number + 1)
        assert len(slots(client)) == 1
        inbox.messages[number].ack()
    wait_for(lambda: not items(client) and not slots(client), 'the last slot to be freed')
    assert sorted(map(str, kept_ids(client))) == sorted(ids)
    assert not any('parked' in doc for doc in kept(client))
    assert not Store(client).leases()['parked']
