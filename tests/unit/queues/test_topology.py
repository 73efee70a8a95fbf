"""Unit tests of queues, exchanges and bindings (`kombu_couchdb.queues.topology`, `kombu_couchdb.queues.routing`)."""

from __future__ import annotations

import os
import re
import time as time_module
import uuid
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.write_result import WriteResult, WriteStatus
from kombu_couchdb.documents.ids import BINDING, QUEUE
from kombu_couchdb.errors import Conflict, NotFound
from kombu_couchdb.queues import routing
from kombu_couchdb.queues import topology as module
from kombu_couchdb.queues.routing import Routes, binding_id, exchange_id, exchange_in, routes_of, topic_pattern
from kombu_couchdb.queues.topology import Topology

Document = dict[str, Any]

NOW = 1_763_709_000.0


# -- topics


@pytest.mark.parametrize(
    ('pattern', 'matching', 'others'),
    [
        ('a.b', ['a.b'], ['a', 'a.b.c', 'a.c', 'axb', 'ab', 'a.b.', '.a.b', '']),
        ('*', ['a', 'stock'], ['a.b', 'a.']),
        ('a.*', ['a.b', 'a.c'], ['a', 'a.b.c', 'b.a']),
        ('*.b', ['a.b'], ['b', 'a.b.b', 'a.c']),
        ('a.*.c', ['a.b.c'], ['a.c', 'a.b.b.c']),
        ('#', ['', 'a', 'a.b', 'a.b.c'], []),
        ('a.#', ['a', 'a.b', 'a.b.c'], ['b', 'b.a', 'ab', 'ab.c', '']),
        ('#.b', ['b', 'a.b', 'a.a.b'], ['a', 'b.a', 'ab', '']),
        ('a.#.b', ['a.b', 'a.x.b', 'a.x.y.b'], ['a', 'b', 'ab', 'a.x']),
        ('#.x.#', ['x', 'a.x', 'x.a', 'a.b.x.c.d'], ['a', 'ax', 'xa', 'a.xa']),
        ('*.#', ['a', 'a.b', 'a.b.c'], []),
        ('#.*', ['a', 'a.b'], []),
        ('*.*', ['a.b'], ['a', 'a.b.c']),
        ('lazy.#.*', ['lazy.a', 'lazy.a.b'], ['lazy']),
        ('a+b.(c', ['a+b.(c'], ['aab.(c', 'a+b.c']),
        ('a*.b#', ['a*.b#'], ['ax.b', 'a.b']),
        ('', [''], ['a', 'a.b']),
        ('task.*', ['task.sent', 'task.ä-1_2'], ['task']),
    ],
)
def test_topics_match_as_in_amqp(pattern: str, matching: list[str], others: list[str]) -> None:
    keys = matching + others
    assert [key for key in keys if re.match(topic_pattern(pattern), '.' + key)] == matching


# -- the table


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The monotonic time of the modules, which changes only when a test sets it."""
    time = SimpleNamespace(now=1000.0)
    time.monotonic = lambda: time.now
    monkeypatch.setattr(routing, 'time', time)
    monkeypatch.setattr(module, 'time', time)
    return time


def binding(exchange: str, key: str, queue: str, pattern: str | None = None) -> Document:
    return {
        '_id': binding_id(exchange, key, queue),
        '_rev': '1-a',
        'type': 'Binding',
        'exchange': exchange,
        'routing_key': key,
        'pattern': pattern,
        'queue': queue,
    }


def table(*bindings: Document) -> Routes:
    routes = Routes()
    for doc in bindings:
        routes.update(doc)
    return routes


def test_direct_exchange_compares_the_whole_key() -> None:
    routes = table(
        binding('ex', 'k', 'q'), binding('ex', 'k', 'r'), binding('ex', 'k.l', 's'), binding('other', 'k', 't')
    )
    assert routes.match('ex', 'k') == {'q', 'r'}
    assert routes.match('ex', 'k.l') == {'s'}
    assert routes.match('ex', '*') == set()
    assert routes.match('unknown', 'k') == set()


def test_topic_exchange_matches_patterns_and_returns_each_queue_once() -> None:
    routes = table(
        *(binding('ex', key, queue, topic_pattern(key)) for key, queue in [('a.*', 'q'), ('a.b', 'q'), ('#', 'r')])
    )
    assert routes.match('ex', 'a.b') == {'q', 'r'}
    assert routes.match('ex', 'b') == {'r'}


@pytest.mark.parametrize('stored', ['.*', r'^\.b$', '(', '', r'^(\.|a|aa)+$'])
def test_stored_pattern_is_not_used_as_a_regular_expression(stored: str) -> None:
    """A user who may write to the database could otherwise keep every publisher busy for ever."""
    routes = table({**binding('ex', 'a.*', 'q', topic_pattern('a.*')), 'pattern': stored})
    assert routes.match('ex', 'b') == set()
    assert routes.match('ex', 'a' * 60 + '!') == set()
    assert routes.match('ex', 'a.b') == ({'q'} if stored else set())


def test_deleted_binding_is_forgotten() -> None:
    routes = table(binding('ex', 'k', 'q'), binding('ex', 'k', 'r'))
    routes.update({'_id': binding_id('ex', 'k', 'q'), '_deleted': True})
    routes.update({'_id': 'unknown', '_deleted': True})
    assert routes.match('ex', 'k') == {'r'}


def test_change_older_than_a_deletion_is_ignored() -> None:
    """The changes feed may report the declaration of an exchange that was deleted here meanwhile."""
    routes, declared = Routes(), {'_id': exchange_id('ex'), 'type': 'Exchange', 'name': 'ex', 'kind': 'fanout'}
    routes.update(declared)
    routes.update({'_id': declared['_id'], '_rev': '1-a', '_deleted': True})
    routes.update({**declared, '_rev': '1-a'})
    assert not routes.is_fanout('ex')
    routes.update({**declared, '_rev': '3-a'})
    assert routes.is_fanout('ex')


def test_replace_changes_only_documents_with_the_prefix() -> None:
    routes = table(binding('ex', 'k', 'q'), binding('ex2', 'k', 'r'))
    new = binding('ex', 'l', 's')
    routes.replace({new['_id']: new}, float('inf'), f'{BINDING}["ex",')
    assert (routes.match('ex', 'k'), routes.match('ex', 'l'), routes.match('ex2', 'k')) == (set(), {'s'}, {'r'})
    routes.replace({}, float('inf'))
    assert routes.match('ex2', 'k') == set()


def test_replace_keeps_updates_made_during_the_read() -> None:
    before, deleted = binding('ex', 'k', 'before'), binding('ex', 'k', 'deleted')
    routes = table(before, deleted)
    began = time_module.monotonic()
    routes.update(binding('ex', 'k', 'new'))
    routes.update({'_id': deleted['_id'], '_deleted': True})
    routes.replace({before['_id']: before, deleted['_id']: deleted}, began)  # as it was when the read began
    assert routes.match('ex', 'k') == {'before', 'new'}


def test_times_of_old_updates_are_forgotten(time: SimpleNamespace) -> None:
    """The changes feed reports a binding for each client of remote control, and a worker rarely reads them all."""
    routes = Routes()
    for number in range(1000):
        time.now += 1.0
        routes.update({'_id': f'{BINDING}{number}', '_deleted': True})
    assert len(routes._updated) < 100


def test_table_without_a_changes_feed_is_trusted_for_50_ms(time: SimpleNamespace) -> None:
    routes = Routes()
    assert not routes.known('ex')
    routes.was_read('ex', time.now)
    assert routes.known('ex')
    assert not routes.known('other')
    time.now += 0.049
    assert routes.known('ex')
    time.now += 0.002
    assert not routes.known('ex')


def test_new_table_is_not_trusted_on_a_machine_that_has_just_booted(time: SimpleNamespace) -> None:
    time.now = 0.0
    assert not Routes().known('ex')


def test_followed_table_is_trusted_for_the_exchanges_that_were_read(time: SimpleNamespace) -> None:
    routes = Routes()
    routes.follow(1.0, ['ex'])
    time.now += 0.99
    assert routes.known('ex')
    assert not routes.known('other')
    time.now += 0.02
    assert not routes.known('ex')
    routes.follow(float('inf'))
    time.now += 1e9
    assert routes.known('ex')
    routes.follow(0.0)
    assert not routes.known('ex')


def test_bindings_read_while_the_feed_is_followed_stay_known(time: SimpleNamespace) -> None:
    routes = Routes()
    routes.follow(1.0)
    routes.was_read('before', time.now)
    routes.follow(float('inf'))
    routes.was_read('ex', time.now)
    time.now += 1e9
    assert routes.known('ex')
    assert not routes.known('before')
    assert routes.wanted == {'ex', 'before'}


def test_each_database_has_one_table_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert routes_of('http://h/a') is routes_of('http://h/a')
    assert routes_of('http://h/a') is not routes_of('http://h/b')
    parent = routes_of('http://h/a')
    monkeypatch.setattr(os, 'getpid', lambda: -1)
    assert routes_of('http://h/a') is not parent


# -- declarations


class FakeClient:
    """A database in memory."""

    def __init__(self) -> None:
        self.docs: dict[str, Document] = {}
        self.address = SimpleNamespace(url=f'http://{uuid.uuid4()}')
        self.clock = SimpleNamespace(now=lambda: NOW)
        self.reads: list[str] = []

    def get(self, doc_id: str) -> Document:
        if doc_id not in self.docs:
            raise NotFound(doc_id)
        return self.docs[doc_id]

    def put(self, doc: Document) -> str:
        if (self.docs.get(doc['_id']) or {}).get('_rev') != doc.get('_rev'):
            raise Conflict(doc['_id'])
        return self.bulk([doc])[0].rev

    def try_put(self, doc: Document) -> str | None:
        try:
            return self.put(doc)
        except Conflict:
            return None

    def bulk(self, docs: list[Document]) -> list[WriteResult]:
        for doc in docs:
            if doc.get('_deleted'):
                del self.docs[doc['_id']]
            else:
                self.docs[doc['_id']] = {**doc, '_rev': f'{len(doc.get("_rev", "")) + 1}-x'}
        return [
            WriteResult(doc['_id'], WriteStatus.STORED, self.docs.get(doc['_id'], {}).get('_rev', '')) for doc in docs
        ]

    def find(self, ids: list[str]) -> list[Document | None]:
        return [self.docs.get(name) for name in ids]

    def id_range(self, prefix: str, *, docs: bool) -> list[Document]:
        self.reads.append(prefix)
        return [{'id': name, 'doc': doc} for name, doc in sorted(self.docs.items()) if name.startswith(prefix)]


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


def topology_of(client: FakeClient) -> Topology:
    return Topology(cast(Client, client))


def test_binding_declared_twice_is_one_document(client: FakeClient) -> None:
    topology = topology_of(client)
    for _ in range(2):
        topology.bind('ex', 'a.#', topic_pattern('a.#'), 'q')
    [doc] = client.docs.values()
    assert {name: doc[name] for name in ('type', 'exchange', 'routing_key', 'pattern', 'queue')} == {
        'type': 'Binding',
        'exchange': 'ex',
        'routing_key': 'a.#',
        'pattern': topic_pattern('a.#'),
        'queue': 'q',
    }


def test_ids_of_bindings_are_unambiguous(client: FakeClient) -> None:
    topology = topology_of(client)
    parts = [('a', 'b', 'c'), ('a","b', '', 'c'), ('a', 'b","c', ''), ('a', '', 'b,c'), ('ä', '\\"', 'c')]
    for exchange, key, queue in parts:
        topology.bind(exchange, key, None, queue)
    assert len(client.docs) == len(parts)
    assert [len(topology.bindings(exchange)) for exchange in ('a', 'a","b', 'ä', '')] == [3, 1, 1, 0]


def test_lookup_reads_only_if_the_table_is_outdated(client: FakeClient, time: SimpleNamespace) -> None:
    topology_of(client).bind('ex', 'k', None, 'q')
    topology = topology_of(client)
    topology.routes = Routes()
    assert topology.lookup('ex', 'k') == {'q'}
    assert topology.lookup('ex', 'k') == {'q'}
    assert len(client.reads) == 1
    time.now += 0.06
    assert topology.lookup('ex', 'k') == {'q'}
    assert len(client.reads) == 2


@pytest.mark.parametrize(('recheck', 'reads'), [(True, 1), (False, 0)])
def test_lookup_without_a_match_reads_again_if_recheck_is_set(
    client: FakeClient, time: SimpleNamespace, recheck: bool, reads: int
) -> None:
    topology = topology_of(client)
    topology.routes.follow(float('inf'), ['ex'])
    new = binding('ex', 'k', 'q')
    client.docs[new['_id']] = new  # another process has just bound it
    assert topology.lookup('ex', 'k', recheck=recheck) == ({'q'} if reads else set())
    assert len(client.reads) == reads


def test_unbound_queue_receives_nothing(client: FakeClient, time: SimpleNamespace) -> None:
    topology = topology_of(client)
    topology.bind('ex', 'k', None, 'q')
    topology.routes.follow(float('inf'), ['ex'])
    assert topology.lookup('ex', 'k', recheck=False) == {'q'}
    topology.unbind('ex', 'k', 'q')
    assert client.docs == {}
    assert topology.lookup('ex', 'k', recheck=False) == set()
    topology.unbind('ex', 'k', 'q')


def test_deleting_a_queue_deletes_only_its_bindings(client: FakeClient) -> None:
    topology = topology_of(client)
    for queue in 'qr':
        topology.declare_queue(queue, {}, False)
        topology.bind('ex', 'k', None, queue)
    topology.delete_queue('q')
    assert [doc.get('queue', doc.get('name')) for doc in client.docs.values()] == ['r', 'r']
    assert (topology.has_queue('q'), topology.has_queue('r')) == (False, True)
    client.docs.clear()
    topology.redeclare()
    assert [doc.get('queue', doc.get('name')) for doc in client.docs.values()] == ['r', 'r']


@pytest.mark.parametrize(
    ('arguments', 'auto_delete', 'lifetime'),
    [
        ({}, False, None),
        ({'x-expires': 1500}, False, 1.5),
        ({'x-expires': '1500'}, True, 1.5),
        ({}, True, 3600.0),
        ({'x-expires': 'soon'}, False, None),
        ({'x-expires': None}, True, 3600.0),
    ],
)
def test_lifetime_of_a_queue(
    client: FakeClient, arguments: Document, auto_delete: bool, lifetime: float | None
) -> None:
    topology_of(client).declare_queue('q', arguments, auto_delete)
    doc = client.docs[QUEUE + 'q']
    assert (doc['lifetime'], doc['expires']) == (lifetime, lifetime and NOW + lifetime)
    assert doc['arguments'] == arguments


def test_declaring_a_temporary_queue_again_prolongs_it(client: FakeClient) -> None:
    topology = topology_of(client)
    topology.declare_queue('q', {}, True)
    client.docs[QUEUE + 'q']['expires'] = NOW - 1
    topology.declare_queue('q', {}, True)
    assert client.docs[QUEUE + 'q']['expires'] == NOW + 3600.0


def test_declaring_another_queue_again_changes_nothing(client: FakeClient) -> None:
    topology = topology_of(client)
    topology.declare_queue('q', {}, False)
    before = dict(client.docs[QUEUE + 'q'])
    topology.declare_queue('q', {'x-max-priority': 5}, False)
    assert client.docs[QUEUE + 'q'] == before


def test_declarations_are_stored_again_in_a_new_database(client: FakeClient) -> None:
    topology = topology_of(client)
    topology.redeclare()
    assert client.docs == {}
    topology.declare_queue('q', {}, False)
    topology.bind('ex', 'k', None, 'q')
    topology.bind('ex', 'l', None, 'q')
    topology.unbind('ex', 'l', 'q')
    client.docs.clear()
    topology.redeclare()
    assert set(client.docs) == {QUEUE + 'q', binding_id('ex', 'k', 'q')}


def test_declaration_in_another_thread_during_redeclare(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The I/O thread calls `redeclare` while kombu's thread declares a queue."""
    topology = topology_of(client)
    topology.declare_queue('q', {}, False)
    client.docs.clear()
    find = client.find

    def find_slowly(ids: list[str]) -> list[Document | None]:
        monkeypatch.setattr(client, 'find', find)
        topology.declare_queue('r', {}, False)
        return find(ids)

    monkeypatch.setattr(client, 'find', find_slowly)
    topology.redeclare()
    assert set(client.docs) == {QUEUE + 'q', QUEUE + 'r'}


def test_prolong_changes_only_expires(client: FakeClient) -> None:
    topology = topology_of(client)
    topology.declare_queue('q', {'x-expires': 5_000_000}, False)
    [before] = topology.queues(['q', 'unknown'])
    assert topology.prolong(before, 5100)
    after = client.docs[QUEUE + 'q']
    assert after['expires'] == NOW + 5100
    assert {**after, 'expires': None, '_rev': None} == {**before, 'expires': None, '_rev': None}


def test_temporary_queue_deleted_by_another_process_is_stored_again(client: FakeClient) -> None:
    topology = topology_of(client)
    topology.declare_queue('temporary', {}, True)
    topology.bind('ex', 'k', None, 'temporary')
    topology.declare_queue('durable', {}, False)
    before = {name: dict(doc) for name, doc in client.docs.items()}
    client.docs.clear()
    topology.restore({'temporary', 'durable'})
    assert client.docs == {}  # no deletion was reported
    for name in before:
        topology.was_deleted(name)
    topology.restore({'durable'})
    assert client.docs == {}
    topology.restore({'temporary', 'durable'})
    assert set(client.docs) == {QUEUE + 'temporary', binding_id('ex', 'k', 'temporary')}
    client.docs.clear()
    topology.restore({'temporary', 'durable'})
    assert client.docs == {}
    topology.restore({'temporary', 'durable'}, check=True)
    assert set(client.docs) == {QUEUE + 'temporary', binding_id('ex', 'k', 'temporary')}


def test_queue_deleted_here_is_not_stored_again(client: FakeClient) -> None:
    topology = topology_of(client)
    topology.declare_queue('temporary', {}, True)
    topology.delete_queue('temporary')
    topology.was_deleted(QUEUE + 'temporary')
    topology.restore({'temporary'}, check=True)
    assert client.docs == {}


def test_queue_changed_meanwhile_is_not_deleted(client: FakeClient) -> None:
    topology = topology_of(client)
    topology.declare_queue('q', {'x-expires': 1000}, False)
    [doc] = topology.queues(['q'])
    bulk = client.bulk
    client.bulk = lambda docs: [WriteResult.conflict(docs[0]['_id'])]  # type: ignore[method-assign]
    assert topology.delete_unused(doc) is None
    client.bulk = lambda docs: [result._replace(status=WriteStatus.UNPROVEN) for result in bulk(docs)]  # type: ignore[method-assign]
    assert topology.delete_unused(doc) is False


@pytest.mark.parametrize('name', ['x', 'ä"\\', '', '[",null,null]'])
def test_name_of_an_exchange_is_in_its_id(name: str) -> None:
    assert exchange_in(exchange_id(name)) == name
    assert exchange_in(binding_id(name, 'null', 'null')) is None


@pytest.mark.parametrize(
    'doc_id', [BINDING + 'malformed,null,null]', BINDING + '[1,null,null]', QUEUE + '["x",null,null]', BINDING]
)
def test_other_ids_have_no_exchange(doc_id: str) -> None:
    assert exchange_in(doc_id) is None
