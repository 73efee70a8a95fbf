"""The status of queues, consumers and databases."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection, Queue

from celery_couchdb.testing import Server
from kombu_couchdb import design
from kombu_couchdb.admin.status import status
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import DatabaseMissing
from kombu_couchdb.leases.leader import LeaderLease
from tests.conftest import wait_for
from tests.support import Inbox, Request, eta, items, publish, publish_many

from .conftest import Run


def heartbeat(name: str, expires_in: float = 60.0, **members: Any) -> dict[str, Any]:
    """Return the heartbeat document of a consumer, written 7 seconds ago."""
    return {
        '_id': f'broker:consumer:{name}',
        'type': 'Consumer',
        'layout': design.NAME,
        'host': 'here',
        'pid': 5,
        'queues': ['q'],
        'beats': 1,
        'date': time.time() - 7,
        'expires': time.time() + expires_in,
        'rates': {'q': 1.5},
        **members,
    }


#: A member of a heartbeat: one task runs, and its message is acknowledged.
RUNNING: dict[str, Any] = {'running': {'queues': {'q': [1, 0]}, 'tasks': []}}


def test_messages_are_counted_by_queue_and_state(
    connection: Connection, connect: Callable[..., Connection], client: Client
) -> None:
    publish_many(connection, range(5), 'q')
    publish_many(connection, range(3), 'q', priority=9)
    publish_many(connection, range(4), 'q', headers=eta(3600))
    publish(connection, 'long due', 'q', headers=eta(-1000), priority=4)
    publish(connection, 'elsewhere', 'other')
    publish(connection, 'refused', 'broken')
    refusing = Inbox(connect(), 'broken', ack=False)
    refusing.wait(1)
    refusing.messages[0].reject()
    holding = Inbox(connect(), 'q', ack=False, prefetch=2)
    holding.wait(2)
    wait_for(lambda: any(item.get('status') for item in items(client)), 'the dead letter')
    found = status(client)
    assert {
        name: {k: queue[k] for k in ('ready', 'scheduled', 'prefetched', 'dead')}
        for name, queue in found['queues'].items()
    } == {
        'q': {'ready': 7, 'scheduled': 4, 'prefetched': 2, 'dead': 0},
        'other': {'ready': 1, 'scheduled': 0, 'prefetched': 0, 'dead': 0},
        'broken': {'ready': 0, 'scheduled': 0, 'prefetched': 0, 'dead': 1},
    }
    assert 1000 <= (found['queues']['q']['oldest'] or 0) < 1100
    assert 0 <= (found['queues']['other']['oldest'] or 0) < 100
    assert found['queues']['broken']['oldest'] is None
    assert found['malformed'] == 0
    assert sorted(tuple(consumer['queues']) for consumer in found['consumers']) == [('broken',), ('q',)]


def test_parked_messages_are_not_ready(connection: Connection, client: Client) -> None:
    publish_many(connection, range(3), 'q')
    first, second, _ = items(client)
    assert status(client)['queues']['q']['parked'] == 0
    client.bulk([{**item, 'parked': {'key': 'k', 'date': time.time()}, 'date': 1.0} for item in (first, second)])
    queue = status(client)['queues']['q']
    assert (queue['ready'], queue['parked'], queue['scheduled']) == (1, 2, 0)
    assert (queue['oldest'] or 0) < 100
    client.bulk([{**item, '_deleted': True} for item in items(client) if not item.get('parked')])
    queue = status(client)['queues']['q']
    assert (queue['ready'], queue['parked'], queue['oldest']) == (0, 2, None)


def test_empty_temporary_queues_are_hidden(connection: Connection, client: Client) -> None:
    channel = connection.default_channel
    Queue('lasting', channel=channel).declare()
    Queue('passing', channel=channel, auto_delete=True).declare()
    client.put(heartbeat('a', queues=['lasting', 'passing']))
    assert list(status(client)['queues']) == ['lasting']
    assert status(client)['consumers'][0]['queues'] == ['lasting']
    assert list(status(client, temporary=True)['queues']) == ['lasting', 'passing']
    assert status(client, temporary=True)['consumers'][0]['queues'] == ['lasting', 'passing']
    publish(connection, 'reply', 'passing')
    queue = status(client)['queues']['passing']
    assert (queue['ready'], queue['temporary']) == (1, True)


def test_queues_for_replies_and_events_are_never_shown(connection: Connection, client: Client, run: Run) -> None:
    """Celery declares them with `auto_delete` and `expires`; `--all` shows them."""
    Queue('celeryev.1', channel=connection.default_channel, auto_delete=True, expires=60).declare()
    publish(connection, 'an event', 'celeryev.1')
    publish(connection, 'work', 'q')
    assert list(status(client)['queues']) == ['q']
    assert list(status(client, temporary=True)['queues']) == ['celeryev.1', 'q']
    assert 'celeryev' not in ''.join(run(*words).output for words in (['status'], ['jobs', 'list'], ['metrics']))


def test_program_that_has_received_replies_is_no_worker(client: Client, connection: Connection) -> None:
    """The page of operators is one, after it has told a worker something."""
    connection.connect()
    client.bulk([heartbeat('page', queues=[]), heartbeat('idle', queues=[], worker='w1@here')])
    assert [consumer['name'] for consumer in status(client)['consumers']] == ['w1@here']


def test_running_tasks_and_leaders_of_workers(connection: Connection, client: Client) -> None:
    """A worker whose lease has ended reports nothing, nor does what no worker writes."""
    for name in ('a', 'b'):
        publish(connection, name, 'q')
    task = {'id': '1', 'task': 'pay', 'queue': 'q', 'since': time.time() - 60}
    own = {'queues': {'q': [3, 1], 'r': [1, 0]}, 'tasks': [task]}
    odd: list[Any] = [5, [], {'queues': 5, 'tasks': {}}, {'queues': {'q': [1]}, 'tasks': [5, {'id': 1}]}]
    client.bulk(
        [
            heartbeat('w1', worker='w1@here', running=own),
            heartbeat('dead', expires_in=-600, running=own, pid=6),
            *(heartbeat(f'odd:{number}', running=each, worker=each) for number, each in enumerate(odd)),
            *({**item, 'claimed': {'by': 'broker:consumer:w1', 'date': 1.0}} for item in items(client)),
            {'_id': 'broker:leader:beat:x', 'type': 'Leader', 'holder': 'here:5:1', 'date': time.time(), 'node': 'b@c'},
            {'_id': 'broker:leader:y', 'type': 'Leader', 'holder': 'here:6:1', 'date': time.time() - 99, 'lease': 90},
            {'_id': 'broker:leader:z', 'type': 'Leader', 'holder': 'there:6:1', 'date': time.time(), 'node': {}},
        ]
    )
    found = status(client)
    assert {name: (queue['prefetched'], queue['running']) for name, queue in found['queues'].items()} == {
        'q': (1, 3),
        'r': (0, 1),
    }
    consumers = {consumer['id']: consumer for consumer in found['consumers']}
    assert (consumers['w1']['name'], consumers['w1']['running'], consumers['w1']['prefetched']) == (
        'w1@here',
        [task],
        1,
    )
    assert (consumers['w1']['leads'], consumers['dead']['leads']) == (['beat:x'], [])
    assert (consumers['odd:0']['name'], consumers['odd:0']['running']) == ('odd', [])
    assert [(each['name'], each['alive']) for each in found['leaders']] == [
        ('b@c', True),
        ('here:6', False),
        ('there:6', True),
    ]


def test_consumers_and_their_rates(connection: Connection, client: Client) -> None:
    publish(connection, 'hello', 'q')
    client.bulk(
        [
            heartbeat('a', rates={'q': 2.25, 'elsewhere': 0.5}),
            heartbeat('b'),
            heartbeat('gone', expires_in=-600),
            {
                '_id': 'broker:consumer:old',
                'type': 'Consumer',
                'host': 'there',
                'pid': 6,
                'queues': ['q'],
                'expires': time.time() + 60,
            },
        ]
    )
    found = status(client)
    consumers = {consumer['id']: consumer for consumer in found['consumers']}
    assert [consumers[name]['alive'] for name in ('a', 'b', 'gone', 'old')] == [True, True, False, True]
    assert [consumers[name]['rate'] for name in ('a', 'b', 'old')] == [2.75, 1.5, 0]
    assert 6 <= (consumers['a']['heartbeat'] or 0) < 60
    assert consumers['old']['heartbeat'] is None
    assert (consumers['old']['host'], consumers['old']['pid'], consumers['old']['queues']) == ('there', 6, ['q'])
    assert found['queues']['q']['rate'] == 3.75  # consumers whose lease expired do not count


def test_consumer_is_overdue_after_its_lease_if_it_holds_messages_and_else_after_three(
    connection: Connection, client: Client
) -> None:
    publish_many(connection, range(2), 'q')
    dates = {'now': 0, 'late': -70, 'gone': -200}
    heartbeats = [
        heartbeat(f'{kind}:{name}', worker=name, date=time.time() + ago, expires_in=ago + 60, **RUNNING)
        for name, ago in dates.items()
        for kind in ('idle', 'busy')
    ]
    late, gone = items(client)
    claims = [
        {**item, 'claimed': {'by': f'broker:consumer:busy:{name}', 'date': 1.0}}
        for item, name in ((late, 'late'), (gone, 'gone'))
    ]
    client.bulk([*heartbeats, *claims])
    found = status(client)
    assert {one['id'] for one in found['consumers'] if one['alive']} == {'idle:now', 'busy:now', 'idle:late'}
    assert (found['queues']['q']['running'], found['queues']['q']['prefetched']) == (3, 2)


def test_leaders_are_shown_with_their_duties(connection: Connection, client: Client) -> None:
    connection.connect()
    leader, standby = LeaderLease(client, 'beat:shop'), LeaderLease(client, 'beat:shop')
    assert leader.step()
    assert not standby.step()
    [found] = status(client)['leaders']
    assert (found['duty'], found['alive']) == ('beat:shop', True)
    assert found['holder'] is not None
    leader.release()
    client.put({'_id': 'broker:leader:odd', 'type': 'Leader', 'holder': 5, 'date': 'today'})
    assert [(each['holder'], each['alive']) for each in status(client)['leaders']] == [(None, False)] * 2


def test_databases_and_server(
    server: Server, connection: Connection, client: Client, database: str, apache_couchdb: bool
) -> None:
    publish(connection, 'hello', 'q')
    Inbox(connection, 'q').wait(1)
    wait_for(lambda: not items(client), 'the ack')
    assert status(client, server.client(f'{database}-results'))['results'] is None
    found = status(client, client)
    assert found['server']['url'] == f'http://{server.host}:{server.port}'
    assert found['server']['embedded'] is not apache_couchdb
    assert found['server']['version'][:1].isdigit()
    assert found['database']['name'] == database
    assert found['database']['documents'] > 0
    assert found['results'] is not None
    assert found['results']['name'] == database
    assert found['broadcasts'] is not None
    assert found['broadcasts']['name'] == f'{database}-broadcasts'
    if apache_couchdb:
        assert found['database']['tombstones'] == 1
        assert (found['database']['size'] or 0) > (found['database']['active'] or 0) > 0
    else:
        assert found['database']['tombstones'] is found['database']['size'] is None


def test_malformed_documents_do_not_break_the_status(connection: Connection, client: Client) -> None:
    publish(connection, 'hello', 'q')
    [item] = items(client)
    good = {name: value for name, value in item.items() if name != '_rev'}
    client.bulk(
        [{**good, '_id': f'malformed {i}', 'queue': queue} for i, queue in enumerate([5, None, ['q'], {'q': 1}, True])]
    )
    client.bulk(
        [
            {**good, '_id': 'priority', 'priority': 'high'},
            {**good, '_id': 'date', 'date': 'soon'},
            {**good, '_id': 'dead', 'queue': 7, 'status': 'fail'},
            {**good, '_id': 'running', 'queue': 7, 'claimed': {'by': 'broker:consumer:a', 'date': 'then'}},
            heartbeat('a', queues=[5, 'q'], rates={'q': 'many'}, pid='none', date='then', host=None),
            heartbeat('b', queues='q', rates=[1], expires='never'),
            {'_id': 'broker:consumer:foreign', 'note': 'no heartbeat'},
            {'_id': 'broker:queue:foreign', 'type': 'Queue'},
        ]
    )
    found = status(client)
    assert found['queues'].keys() == {'q'}
    assert found['queues']['q']['ready'] == 3
    assert (found['queues']['q']['oldest'] or 0) < 100
    assert found['malformed'] == 7
    assert [
        (consumer['queues'], consumer['rate'], consumer['pid'], consumer['alive']) for consumer in found['consumers']
    ] == [(['q'], 0, None, True), ([], 0, 5, False)]


@pytest.mark.parametrize('exists', [True, False])
def test_database_that_is_not_set_up_is_one_sentence(server: Server, database: str, exists: bool) -> None:
    client = server.client(database)
    if exists:
        client.create()
    with pytest.raises(DatabaseMissing, match=r'is not set up; run "celery -A your_app couchdb setup"'):
        status(client)


def test_six_requests_read_all_that_changes(client: Client, connection: Connection, sent: list[Request]) -> None:
    publish(connection, 'now', 'q')
    publish(connection, 'later', 'q', headers=eta(3600))
    first = status(client)
    sent.clear()
    publish(connection, 'more', 'q')
    published = len(sent)
    found = status(client, earlier=first)
    assert len(sent) - published == 6
    assert (found['queues']['q']['ready'], found['queues']['q']['scheduled']) == (2, 1)
    assert (found['database'], found['server']) == (first['database'], first['server'])
