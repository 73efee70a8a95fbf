"""The history of tasks and queues: what its leader reads and writes, and what readers get."""

from __future__ import annotations

from typing import Any

import pytest
from kombu import Connection, Queue

from celery_couchdb.contrib.metrics import history as module
from celery_couchdb.contrib.metrics.history import History, Minute, read_history
from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.leases import leader
from tests.support import Request, eta, publish, publish_many

#: The beginning of ten minutes.
START = 1_800_000_000.0


class World:
    """A database with workers, and time: that of the server and that of the leader's machine."""

    def __init__(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client, self.now = client, START
        monkeypatch.setattr(client.clock, 'now', lambda: self.now)
        monkeypatch.setattr(module, 'time', self)
        monkeypatch.setattr(leader, 'uptime', self.monotonic)
        self.duty = History(client)

    def monotonic(self) -> float:
        return self.now

    def worker(self, name: str, since: float = START, tasks: Any = None, **counts: dict[str, Any]) -> None:
        """Write the heartbeat of a worker with these counts."""
        doc_id = f'broker:consumer:host:{name}'
        found = {
            '_id': doc_id,
            'type': 'Consumer',
            'queues': ['q'],
            'date': self.now,
            'expires': self.now + 60,
            'tasks': tasks or {'since': since, 'counts': counts},
        }
        if before := self.client.get_or_none(doc_id):
            found['_rev'] = before['_rev']
        self.client.put(found)

    def stop(self, name: str, **counts: dict[str, Any]) -> None:
        """Delete the heartbeat of a worker: one that stops leaves its counts; a killed one has none."""
        doc = self.client.get(f'broker:consumer:host:{name}')
        left = {'tasks': {**doc['tasks'], 'counts': counts}} if counts else {}
        assert self.client.bulk([{**deletion(doc), **left}])[0].is_stored

    def minute(self) -> None:
        """Let a minute pass, and the leader do its duty."""
        self.now += 60
        self.duty.step()

    def restart(self) -> None:
        """Let another process lead."""
        self.duty.close()
        self.duty = History(self.client)

    def minutes(self) -> list[Minute]:
        return read_history(self.client, 1)

    def tasks(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the tasks of each minute, with the number of the minute."""
        return [(int((each['date'] - START) // 60), each['tasks']) for each in self.minutes()]


@pytest.fixture
def world(client: Client, connection: Connection, monkeypatch: pytest.MonkeyPatch) -> World:
    connection.connect()
    world = World(client, monkeypatch)
    world.duty.step()
    return world


def test_what_is_new_in_each_minute(world: World) -> None:
    world.worker('1:a', pay={'succeeded': 3, 'run': {'sum': 1.5}}, mail={'failed': 1, 'revoked': 5})
    world.worker('2:b', pay={'succeeded': 2, 'retried': 1})
    world.minute()
    world.minute()
    world.worker('1:a', pay={'succeeded': 10, 'run': {'sum': 2.0}}, mail={'failed': 1, 'revoked': 5})
    world.minute()
    assert world.tasks() == [
        (0, {'pay': {'succeeded': 5, 'retried': 1, 'seconds': 1.5}, 'mail': {'failed': 1}}),
        (2, {'pay': {'succeeded': 7, 'seconds': 0.5}}),
    ]


def test_queues_at_the_end_of_each_minute(world: World, connection: Connection, client: Client) -> None:
    Queue('celeryev.1', channel=connection.default_channel, auto_delete=True, expires=600).declare()
    publish(connection, 'an event', 'celeryev.1')
    publish_many(connection, range(3), 'q')
    publish(connection, 'later', 'planned', headers=eta(10**9))
    world.minute()
    [minute] = world.minutes()
    assert minute['queues'].keys() == {'q'}
    assert minute['queues']['q'].keys() == {'ready', 'oldest'}
    assert minute['queues']['q']['ready'] == 3


def test_nothing_is_written_in_a_quiet_minute(world: World, sent: list[Request]) -> None:
    world.worker('1:a', pay={'succeeded': 3})
    world.minute()
    sent.clear()
    for _ in range(5):
        world.minute()
    written = [doc['_id'] for request in sent for doc in request.docs if request.path == '/_bulk_docs']
    assert set(written) == {'broker:leader:history'}
    assert len([request for request in sent if 'history:' in str(request.path)]) == 0
    assert len(sent) <= 5 * 5  # the lead, the heartbeats, and what waits and is claimed


def test_new_leader_goes_on_where_the_last_one_has_stopped(world: World) -> None:
    world.worker('1:a', pay={'succeeded': 3})
    world.minute()
    world.duty.close()
    world.worker('1:a', pay={'succeeded': 4})
    world.worker('2:b', pay={'failed': 2})
    world.restart()
    world.minute()
    world.restart()
    world.minute()
    assert world.tasks() == [(0, {'pay': {'succeeded': 3}}), (1, {'pay': {'succeeded': 1, 'failed': 2}})]


def test_worker_that_stops_leaves_its_last_counts(world: World) -> None:
    for name in ('1:a', '2:b', '3:c'):
        world.worker(name, pay={'succeeded': 1})
    world.minute()
    world.stop('1:a', pay={'succeeded': 5})
    world.stop('2:b')  # it was killed
    world.minute()
    world.restart()
    world.minute()
    assert world.tasks() == [(0, {'pay': {'succeeded': 3}}), (1, {'pay': {'succeeded': 4}})]


def test_process_with_a_new_lease_is_not_counted_twice(world: World) -> None:
    world.worker('1:a', pay={'succeeded': 3})
    world.minute()
    world.stop('1:a')
    world.worker('1:b', pay={'succeeded': 4})
    world.worker('1:c', since=START + 90, pay={'succeeded': 1})  # another process with the same id, after a restart
    world.minute()
    assert world.tasks() == [(0, {'pay': {'succeeded': 3}}), (1, {'pay': {'succeeded': 2}})]


def test_documents_are_used_again_the_next_day(world: World, client: Client) -> None:
    for count in range(3):
        world.worker('1:a', pay={'succeeded': count + 1})
        world.minute()
    world.now += 86_400 - 120
    world.worker('1:a', pay={'succeeded': 10})
    world.minute()
    [row] = client.id_range('broker:history:', docs=True)
    assert len(row['doc']['minutes']) == 1
    world.now += 600
    world.worker('1:a', pay={'succeeded': 11})
    world.minute()
    docs = [row['doc'] for row in client.id_range('broker:history:', docs=True)]
    assert [('totals' in doc, len(doc['minutes'])) for doc in docs] == [(False, 1), (True, 1)]
    assert [each['tasks']['pay']['succeeded'] for each in world.minutes()] == [7, 1]
    assert read_history(client, 0.001)[-1] == world.minutes()[-1]


def test_malformed_documents_are_ignored(world: World, client: Client) -> None:
    for number, tasks in enumerate(({'since': [], 'counts': 5}, {'counts': {'a': {'succeeded': {}}}}, [1], 'x')):
        world.worker(f'{number}:odd', tasks=tasks)
    world.worker('9:a', pay={'succeeded': 2})
    odd_docs: list[dict[str, Any]] = [
        {'date': 'now', 'totals': {}},
        {'date': 1e12, 'totals': {'a': {'tasks': {'b': 1}}}},
    ]
    for number, doc in enumerate(odd_docs):
        client.put({'_id': f'broker:history:{number:03}', 'type': 'History', 'minutes': 7, **doc})
    world.restart()
    world.minute()
    world.worker('9:a', pay={'succeeded': 3})
    world.minute()
    assert [tasks['pay']['succeeded'] for _, tasks in world.tasks()] == [2, 1]
    for row in client.id_range('broker:history:', docs=True):
        odd = {'0': 5, '1': {'tasks': [], 'queues': {'q': 5}}, '99': {}, 'x': {}}
        client.put({**row['doc'], 'date': START, 'minutes': odd})
    assert all(each['tasks'] == {} for each in read_history(client, 24))


def test_many_tasks_and_queues(world: World, connection: Connection) -> None:
    many = {f'task {number}': {'succeeded': number + 1} for number in range(200)}
    world.worker('1:a', tasks={'since': START, 'counts': many})
    more = {f'other {number}': {'failed': 1} for number in range(150)}
    world.worker('2:b', tasks={'since': START, 'counts': more})
    world.minute()
    [(_, tasks)] = world.tasks()
    assert len(tasks) == 200
    assert sum(each.get('succeeded', 0) for each in tasks.values()) == 200 * 201 / 2
    assert sum(each.get('failed', 0) for each in tasks.values()) == 150
