"""The node of a cluster from which a replication pulls, and replications that have reached their source."""

from __future__ import annotations

from typing import Any

import pytest

from kombu_couchdb.admin import region_nodes, replications
from kombu_couchdb.couchdb.urls import parse_list
from kombu_couchdb.errors import AccessDenied

A, B, C = 'http://a:5984', 'http://b:5984', 'http://c:5984'
CLUSTER = parse_list([f'couchdb://{host}/r' for host in 'abc'], 'regions', 'celery')


@pytest.mark.parametrize(
    ('up', 'used', 'choice'),
    [
        ((A, B, C), None, A),
        ((B, C), None, B),
        ((A, B, C), C, C),
        ((A, B), C, A),
        ((A, B, C), 'http://gone:5984', A),
        ((), B, B),
        ((), None, A),
    ],
)
def test_node_in_use_is_chosen_if_it_responds_and_else_the_first_that_does(
    monkeypatch: pytest.MonkeyPatch, up: tuple[str, ...], used: str | None, choice: str
) -> None:
    monkeypatch.setattr(region_nodes, 'responds', lambda node: node.server in up)
    found = region_nodes.chosen(CLUSTER, used)
    assert (found.server, found.others) == (choice, ())


def test_single_node_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_nodes, 'responds', lambda node: pytest.fail('it was asked'))
    single = parse_list(['couchdb://a/r'], 'regions', 'celery')
    assert region_nodes.chosen(single, None) == region_nodes.chosen(single, B) == single


class Server:
    """A server with these replications and tasks."""

    def __init__(self, docs: list[dict[str, Any]], tasks: list[dict[str, Any]] | None) -> None:
        self._docs, self._tasks = docs, tasks

    def request(self, method: str, path: str, *_: Any, **__: Any) -> Any:
        if path.endswith('_all_docs'):
            return {'rows': [{'id': doc['_id'], 'doc': doc} for doc in self._docs]}
        if self._tasks is None:
            raise AccessDenied('no')
        return self._tasks


@pytest.mark.parametrize(
    ('doc', 'task', 'expected'),
    [
        ({}, {'doc_id': 'r', 'checkpoint_interval': 30000}, {'r'}),
        ({'checkpoint_interval': 30001}, {'doc_id': 'r', 'checkpoint_interval': 30001}, {'r'}),
        ({'checkpoint_interval': 30002}, {'doc_id': 'r', 'checkpoint_interval': 30001}, set()),
        ({'checkpoint_interval': 30001}, {'doc_id': 'r', 'checkpoint_interval': 30000}, set()),
        ({}, {'doc_id': 'other', 'checkpoint_interval': 30000}, set()),
        ({}, {'type': 'indexer'}, set()),
    ],
)
def test_replication_has_reached_its_source_if_it_is_a_task_with_the_settings_of_its_document(
    doc: dict[str, Any], task: dict[str, Any], expected: set[str]
) -> None:
    server: Any = Server([{'_id': 'r', **doc}], [task])
    assert replications.reached(server, 'eu') == expected


def test_only_administrators_know_whether_a_replication_has_reached_its_source() -> None:
    server: Any = Server([{'_id': 'r'}], None)
    assert replications.reached(server, 'eu') is None


@pytest.mark.parametrize(
    ('source', 'server'),
    [('http://a:1/x', 'http://a:1'), ({'url': 'http://a:1/x%2Fy/'}, 'http://a:1'), (None, None), ({}, None)],
)
def test_server_in_a_source(source: Any, server: str | None) -> None:
    assert replications.server_in(source) == server
