"""Bindings, and where they lead a message (`kombu_couchdb.queues.topology`, `kombu_couchdb.queues.routing`)."""

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
    """The monotonic time of the module, which stands still."""
    time = SimpleNamespace(now=1000.0, monotonic=lambda: time.now)
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


def test_a_direct_exchange_goes_by_the_whole_key() -> None:
    routes = table(
        binding('ex', 'k', 'q'), binding('ex', 'k', 'r'), binding('ex', 'k.l', 's'), binding('other', 'k', 't')
    )
    assert routes.match('ex', 'k') == {'q', 'r'}
    assert routes.match('ex', 'k.l') == {'s'}
    assert routes.match('ex', '*') == set()
    assert routes.match('nobody', 'k') == set()


def test_a_topic_exchange_goes_by_the_pattern_and_each_queue_has_it_once() -> None:
    routes = table(
        *(binding('ex', key, queue, topic_pattern(key)) for key, queue in [('a.*', 'q'), ('a.b', 'q'), ('#', 'r')])
    )
    assert routes.match('ex', 'a.b') == {'q', 'r'}
    assert routes.match('ex', 'b') == {'r'}


@pytest.mark.parametrize('stored', ['.*', r'^\.b$', '(', '', r'^(\.|a|aa)+$'])
def test_the_pattern_in_a_document_is_no_regular_expression_of_ours(stored: str) -> None:
    """Whoever may write to the database could have every publisher compute for ever."""
    routes = table({**binding('ex', 'a.*', 'q', topic_pattern('a.*')), 'pattern': stored})
    assert routes.match('ex', 'b') == set()
    assert routes.match('ex', 'a' * 60 + '!') == set()
    assert routes.match('ex', 'a.b') == ({'q'} if stored else set())


def test_a_deleted_binding_is_forgotten() -> None:
    routes = table(binding('ex', 'k', 'q'), binding('ex', 'k', 'r'))
    routes.update({'_id': binding_id('ex', 'k', 'q'), '_deleted': True})
    routes.update({'_id': 'unknown', '_deleted': True})
    assert routes.match('ex', 'k') == {'r'}


def test_news_that_are_older_than_a_deletion_do_not_bring_it_back() -> None:
    """The feed may tell of the declaration of an exchange that was deleted here meanwhile."""
    routes, declared = Routes(), {'_id': exchange_id('ex'), 'type': 'Exchange', 'name': 'ex', 'kind': 'fanout'}
    routes.update(declared)
    routes.update({'_id': declared['_id'], '_rev': '1-a', '_deleted': True})
    routes.update({**declared, '_rev': '1-a'})
    assert not routes.is_fanout('ex')
    routes.update({**declared, '_rev': '3-a'})
    assert routes.is_fanout('ex')


def test_replaced_are_those_of_the_prefix_only() -> None:
    routes = table(binding('ex', 'k', 'q'), binding('ex2', 'k', 'r'))
    new = binding('ex', 'l', 's')
    routes.replace({new['_id']: new}, float('inf'), f'{BINDING}["ex",')
    assert (routes.match('ex', 'k'), routes.match('ex', 'l'), routes.match('ex2', 'k')) == (set(), {'s'}, {'r'})
    routes.replace({}, float('inf'))
    assert routes.match('ex2', 'k') == set()


def test_what_was_bound_while_others_read_the_bindings_stays() -> None:
    before, gone = binding('ex', 'k', 'before'), binding('ex', 'k', 'gone')
    routes = table(before, gone)
    began = time_module.monotonic()
    routes.update(binding('ex', 'k', 'new'))
    routes.update({'_id': gone['_id'], '_deleted': True})
    routes.replace({before['_id']: before, gone['_id']: gone}, began)  # as it was when the reading began
    assert routes.match('ex', 'k') == {'before', 'new'}


def test_what_was_told_of_long_ago_is_not_remembered(time: SimpleNamespace) -> None:
    """A worker is told of a binding for each client that asks something, and seldom reads them all."""
    routes = Routes()
    for number in range(1000):
        time.now += 1.0
        routes.update({'_id': f'{BINDING}{number}', '_deleted': True})
    assert len(routes._updated) < 100


def test_a_table_that_nobody_keeps_is_trusted_for_a_moment(time: SimpleNamespace) -> None:
    routes = Routes()
    assert not routes.known('ex')
    routes.was_read('ex', time.now)
    assert routes.known('ex')
    assert not routes.known('other')
    time.now += 0.049
    assert routes.known('ex')
    time.now += 0.002
    assert not routes.known('ex')


def test_a_machine_that_was_started_just_now_knows_nothing_either(time: SimpleNamespace) -> None:
    time.now = 0.0
    assert not Routes().known('ex')


def test_a_table_that_is_followed_is_trusted_for_the_exchanges_that_were_read(time: SimpleNamespace) -> None:
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


def test_while_the_feed_tells_of_all_changes_what_is_read_stays_known(time: SimpleNamespace) -> None:
    routes = Routes()
    routes.follow(1.0)
    routes.was_read('looked for', time.now)
    routes.follow(float('inf'))
    routes.was_read('ex', time.now)
    time.now += 1e9
    assert routes.known('ex')
    assert not routes.known('looked for')
    assert routes.wanted == {'ex', 'looked for'}


def test_one_table_for_each_database_and_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert routes_of('http://h/a') is routes_of('http://h/a')
    assert routes_of('http://h/a') is not routes_of('http://h/b')
    parent = routes_of('http://h/a')
    monkeypatch.setattr(os, 'getpid', lambda: -1)
    assert routes_of('http://h/a') is not parent


# -- declarations


class FakeClient:
    """The documents of a database of its own."""

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


def test_a_binding_is_a_document_with_a_name_made_of_its_parts(client: FakeClient) -> None:
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


def test_no_names_run_into_each_other(client: FakeClient) -> None:
    topology = topology_of(client)
    parts = [('a', 'b', 'c'), ('a","b', '', 'c'), ('a', 'b","c', ''), ('a', '', 'b,c'), ('ä', '\\"', 'c')]
    for exchange, key, queue in parts:
        topology.bind(exchange, key, None, queue)
    assert len(client.docs) == len(parts)
    assert [len(topology.bindings(exchange)) for exchange in ('a', 'a","b', 'ä', '')] == [3, 1, 1, 0]


def test_a_lookup_reads_once_and_then_trusts_the_table(client: FakeClient, time: SimpleNamespace) -> None:
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
def test_before_a_message_goes_nowhere_it_looks_again_but_not_for_events(
    client: FakeClient, time: SimpleNamespace, recheck: bool, reads: int
) -> None:
    topology = topology_of(client)
    topology.routes.follow(float('inf'), ['ex'])
    new = binding('ex', 'k', 'q')
    client.docs[new['_id']] = new  # another process bound it just now
    assert topology.lookup('ex', 'k', recheck=recheck) == ({'q'} if reads else set())
    assert len(client.reads) == reads


def test_an_unbound_queue_gets_nothing(client: FakeClient, time: SimpleNamespace) -> None:
    topology = topology_of(client)
    topology.bind('ex', 'k', None, 'q')
    topology.routes.follow(float('inf'), ['ex'])
    assert topology.lookup('ex', 'k', recheck=False) == {'q'}
    topology.unbind('ex', 'k', 'q')
    assert client.docs == {}
    assert topology.lookup('ex', 'k', recheck=False) == set()
    topology.unbind('ex', 'k', 'q')


def test_a_deleted_queue_goes_with_its_bindings_and_no_others(client: FakeClient) -> None:
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
def test_the_lifetime_of_a_queue(
    client: FakeClient, arguments: Document, auto_delete: bool, lifetime: float | None
) -> None:
    topology_of(client).declare_queue('q', arguments, auto_delete)
    doc = client.docs[QUEUE + 'q']
    assert (doc['lifetime'], doc['expires']) == (lifetime, lifetime and NOW + lifetime)
    assert doc['arguments'] == arguments


def test_declared_again_a_temporary_queue_lives_on(client: FakeClient) -> None:
    topology = topology_of(client)
    topology.declare_queue('q', {}, True)
    client.docs[QUEUE + 'q']['expires'] = NOW - 1
    topology.declare_queue('q', {}, True)
    assert client.docs[QUEUE + 'q']['expires'] == NOW + 3600.0


def test_declared_again_another_queue_is_left_as_it_is(client: FakeClient) -> None:
    topology = topology_of(client)
    topology.declare_queue('q', {}, False)
    before = dict(client.docs[QUEUE + 'q'])
    topology.declare_queue('q', {'x-max-priority': 5}, False)
    assert client.docs[QUEUE + 'q'] == before


def test_what_was_declared_is_stored_again_in_a_new_database(client: FakeClient) -> None:
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


def test_what_is_declared_while_others_are_declared_again_stops_nobody(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The I/O thread declares again, kombu's thread declares."""
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


def test_the_end_of_a_queue_in_use_is_moved(client: FakeClient) -> None:
    topology = topology_of(client)
    topology.declare_queue('q', {'x-expires': 5_000_000}, False)
    [before] = topology.queues(['q', 'unknown'])
    assert topology.prolong(before, 5100)
    after = client.docs[QUEUE + 'q']
    assert after['expires'] == NOW + 5100
    assert {**after, 'expires': None, '_rev': None} == {**before, 'expires': None, '_rev': None}


def test_what_others_deleted_of_a_temporary_queue_is_stored_again(client: FakeClient) -> None:
    topology = topology_of(client)
    topology.declare_queue('temporary', {}, True)
    topology.bind('ex', 'k', None, 'temporary')
    topology.declare_queue('durable', {}, False)
    before = {name: dict(doc) for name, doc in client.docs.items()}
    client.docs.clear()
    topology.restore({'temporary', 'durable'})
    assert client.docs == {}  # nobody has told that they are gone
    for name in before:
        topology.declarations.was_deleted(name)
    topology.restore({'durable'})
    assert client.docs == {}
    topology.restore({'temporary', 'durable'})
    assert set(client.docs) == {QUEUE + 'temporary', binding_id('ex', 'k', 'temporary')}
    client.docs.clear()
    topology.restore({'temporary', 'durable'})
    assert client.docs == {}
    topology.restore({'temporary', 'durable'}, check=True)
    assert set(client.docs) == {QUEUE + 'temporary', binding_id('ex', 'k', 'temporary')}


def test_what_was_deleted_here_is_not_stored_again(client: FakeClient) -> None:
    topology = topology_of(client)
    topology.declare_queue('temporary', {}, True)
    topology.delete_queue('temporary')
    topology.declarations.was_deleted(QUEUE + 'temporary')
    topology.restore({'temporary'}, check=True)
    assert client.docs == {}


def test_a_queue_that_was_changed_meanwhile_is_not_deleted(client: FakeClient) -> None:
    topology = topology_of(client)
    topology.declare_queue('q', {'x-expires': 1000}, False)
    [doc] = topology.queues(['q'])
    bulk = client.bulk
    client.bulk = lambda docs: [WriteResult.conflict(docs[0]['_id'])]  # type: ignore[method-assign]
    assert topology.delete_unused(doc) is None
    client.bulk = lambda docs: [answer._replace(status=WriteStatus.UNPROVEN) for answer in bulk(docs)]  # type: ignore[method-assign]
    assert topology.delete_unused(doc) is False


@pytest.mark.parametrize('name', ['x', 'ä"\\', '', '[",null,null]'])
def test_an_exchange_is_known_by_its_id(name: str) -> None:
    assert exchange_in(exchange_id(name)) == name
    assert exchange_in(binding_id(name, 'null', 'null')) is None


@pytest.mark.parametrize(
    'doc_id', [BINDING + 'spoilt,null,null]', BINDING + '[1,null,null]', QUEUE + '["x",null,null]', BINDING]
)
def test_what_is_no_exchange(doc_id: str) -> None:
    assert exchange_in(doc_id) is None
