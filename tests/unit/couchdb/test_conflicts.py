"""When conflicts are resolved (`kombu_couchdb.couchdb.conflicts`), with a simulated clock and server."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kombu_couchdb.couchdb import conflicts
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.conflicts import SYNC, ConflictResolver
from kombu_couchdb.couchdb.write_result import WriteResult, WriteStatus


class Server:
    """One document with two leaf revisions."""

    def __init__(self) -> None:
        self.revs, self.replicas, self.written = ['2-b', '2-a'], 3, list[str]()
        self.status = WriteStatus.STORED
        #: Whether the index has the document.
        self.shows = True

    def view(self, *_: Any, **params: Any) -> list[dict[str, Any]]:
        return [{'id': 'x', 'value': self.revs}] if self.shows else []

    def leaves(self, doc_id: str) -> list[dict[str, Any]]:
        return [{'_id': doc_id, '_rev': rev, 'type': 'Slot'} for rev in self.revs]

    def bulk(self, docs: Sequence[dict[str, Any]]) -> list[WriteResult]:
        self.written += [doc['_rev'] for doc in docs]
        return [WriteResult(doc['_id'], self.status, '3-a') for doc in docs]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The simulated monotonic time."""
    now = [1000.0]
    monkeypatch.setattr(conflicts, 'time', SimpleNamespace(monotonic=lambda: now[0]))
    return now


def resolver_of(server: Server) -> ConflictResolver:
    return ConflictResolver(
        cast(Client, server), {'_id': '_design/conflicted'}, {'Slot': lambda leaves, living: leaves}
    )


def test_conflict_is_resolved_when_its_leaves_have_not_changed_for_a_while(now: list[float]) -> None:
    """The nodes of a cluster may not have sent each other all leaf revisions yet."""
    server = Server()
    resolver = resolver_of(server)
    assert resolver.resolve(()) == 0
    now[0] += SYNC - 0.1
    server.revs = ['2-c', '2-b', '2-a']
    assert resolver.resolve(()) == 0
    now[0] += SYNC - 0.1
    assert (resolver.resolve(()), server.written) == (0, [])
    now[0] += 0.2
    assert (resolver.resolve(()), server.written) == (1, ['2-c', '2-b', '2-a'])


@pytest.mark.parametrize('replicas', [1, 3])
def test_expected_conflict_of_a_cluster_is_resolved_soon(now: list[float], replicas: int) -> None:
    """Even if the first look only lets the server update the index."""
    server = Server()
    server.replicas, server.shows = replicas, False
    resolver, soon = resolver_of(server), now[0] + 3 * SYNC
    resolver.expect()
    while resolver.due <= soon:
        now[0] = resolver.due
        resolver.resolve(())
        server.shows = True
    assert bool(server.written) == (replicas == 3)


@pytest.mark.parametrize('status', [WriteStatus.UNPROVEN, WriteStatus.CONFLICT])
def test_no_leaf_is_deleted_after_a_write_that_is_not_proven(now: list[float], status: WriteStatus) -> None:
    """The first write changes the leaf that is kept."""
    server = Server()
    server.status = status
    resolver = resolver_of(server)
    resolver.resolve(())
    now[0] += SYNC
    assert (resolver.resolve(()), server.written) == (0, ['2-b'])
