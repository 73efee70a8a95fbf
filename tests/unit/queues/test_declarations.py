"""Unit tests of bindings and of the table of declarations (`documents.bindings`, `queues.declarations`)."""

from __future__ import annotations

import time as time_module
from typing import Any

import pytest

from kombu_couchdb.documents.bindings import binding_id, exchange_id, exchange_in, headers_match, topic_matches
from kombu_couchdb.documents.ids import BINDING, QUEUE
from kombu_couchdb.queues.declarations import Declarations

Document = dict[str, Any]


# -- topics


@pytest.mark.parametrize(
    ('pattern', 'matching', 'others'),
    [
        ('a.b', ['a.b'], ['a', 'a.b.c', 'a.c', 'axb', 'ab', 'a.b.', '.a.b', '']),
        ('a.*', ['a.b', 'a.c'], ['a', 'a.b.c', 'b.a']),
        ('#', ['', 'a', 'a.b', 'a.b.c'], []),
        ('a.#', ['a', 'a.b', 'a.b.c'], ['b', 'b.a', 'ab', 'ab.c', '']),
        ('a.#.b', ['a.b', 'a.x.b', 'a.x.y.b'], ['a', 'b', 'ab', 'a.x']),
        ('#.x.#', ['x', 'a.x', 'x.a', 'a.b.x.c.d'], ['a', 'ax', 'xa', 'a.xa']),
        ('lazy.#.*', ['lazy.a', 'lazy.a.b'], ['lazy']),
        ('a+b.(c', ['a+b.(c'], ['aab.(c', 'a+b.c']),
        ('a*.b#', ['a*.b#'], ['ax.b', 'a.b']),
        ('', [''], ['a', 'a.b']),
        ('task.*', ['task.sent', 'task.ä-1_2'], ['task']),
    ],
)
def test_topics_match_as_in_amqp(pattern: str, matching: list[str], others: list[str]) -> None:
    assert [key for key in matching + others if topic_matches(pattern, key)] == matching


@pytest.mark.parametrize(
    ('arguments', 'matching', 'others'),
    [
        ({}, [{}, {'a': 1}], []),
        ({'a': 1, 'b': 'x'}, [{'a': 1, 'b': 'x', 'c': 2}, {'a': 1.0, 'b': 'x'}], [{'a': 1}, {'a': True, 'b': 'x'}, {}]),
        ({'x-match': 'all', 'a': None}, [{'a': 1}, {'a': None}], [{}]),
        ({'x-match': 'any', 'a': 1, 'b': 2}, [{'a': 1}, {'b': 2, 'a': 3}], [{}, {'a': 2}, {'x-match': 'any'}]),
        ({'x-match': 'any'}, [], [{}, {'a': 1}]),
        ({'x-match': 'all', 'a': 1, 'x-b': 2}, [{'a': 1}], [{'x-b': 2}]),
        ({'x-match': 'all-with-x', 'a': 1, 'x-b': 2}, [{'a': 1, 'x-b': 2}], [{'a': 1}]),
        ({'x-match': 'any', 'x-b': 2}, [], [{'x-b': 2}]),
        ({'x-match': 'any-with-x', 'x-b': 2}, [{'x-b': 2}], [{}]),
        ({'x-match': ['any'], 'a': 1}, [], [{'a': 1}]),  # not written by this transport
    ],
)
def test_headers_match_as_in_rabbitmq(arguments: Document, matching: list[Document], others: list[Document]) -> None:
    assert [headers for headers in matching + others if headers_match(arguments, headers)] == matching


# -- the table


def binding(exchange: str, key: str, queue: str, pattern: str | None = None) -> Document:
    members = {'exchange': exchange, 'routing_key': key, 'pattern': pattern, 'queue': queue}
    return {'_id': binding_id(exchange, key, queue), '_rev': '1-a', 'type': 'Binding', **members}


def table(*bindings: Document) -> Declarations:
    routes = Declarations()
    for doc in bindings:
        routes.update(doc)
    return routes


@pytest.mark.parametrize('stored', ['.*', r'^\.b$', '(', '', r'^(\.|a|aa)+$'])
def test_stored_pattern_is_not_used_as_a_regular_expression(stored: str) -> None:
    """A user who may write to the database could otherwise keep every publisher busy for ever."""
    doc = binding('ex', 'a.*', 'q', stored)
    routes = table(doc)
    assert routes.match('ex', 'b', {}) == {}
    assert routes.match('ex', 'a' * 60 + '!', {}) == {}
    assert routes.match('ex', 'a.b', {}) == ({'q': doc} if stored else {})


def test_change_older_than_a_deletion_is_ignored() -> None:
    """The changes feed may report the declaration of an exchange that was deleted here meanwhile."""
    routes, declared = Declarations(), {'_id': exchange_id('ex'), 'type': 'Exchange', 'name': 'ex', 'kind': 'fanout'}
    routes.update(declared)
    routes.update({'_id': declared['_id'], '_rev': '1-a', '_deleted': True})
    routes.update({**declared, '_rev': '1-a'})
    assert not routes.is_fanout('ex')
    routes.update({**declared, '_rev': '3-a'})
    assert routes.is_fanout('ex')


def test_replace_keeps_updates_made_during_the_read() -> None:
    before, deleted = binding('ex', 'k', 'before'), binding('ex', 'k', 'deleted')
    routes = table(before, deleted)
    began = time_module.monotonic()
    routes.update(binding('ex', 'k', 'new'))
    routes.update({'_id': deleted['_id'], '_deleted': True})
    routes.replace((BINDING,), [before, deleted], began)  # as it was when the read began
    assert sorted(routes.match('ex', 'k', {}) or ()) == ['before', 'new']


# -- declarations


@pytest.mark.parametrize('name', ['x', 'ä"\\', '', '[",null,null]'])
def test_name_of_an_exchange_is_in_its_id(name: str) -> None:
    assert exchange_in(exchange_id(name)) == name
    assert exchange_in(binding_id(name, 'null', 'null')) is None
    for other in (BINDING + 'malformed,null,null]', BINDING + '[1,null,null]', QUEUE + '["x",null,null]', BINDING):
        assert exchange_in(other) is None
