"""The DoneItem (`kombu_couchdb.documents.workitem`), and the rules that keep it done."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kombu_couchdb.documents import workitem
from kombu_couchdb.documents.conflict_rules import decide, resolve

NOW = 100.0


def item(rev: str = '2-b', by: str | None = 'us', **more: Any) -> dict[str, Any]:
    message = {'body': '[]', 'headers': {'id': 'task', 'task': 'report'}, 'properties': {'delivery_tag': 'tag'}}
    return {
        '_id': 'x',
        '_rev': rev,
        'type': 'WorkItem',
        'queue': 'q',
        'date': None,
        'published': 1.0,
        'attempts': 1,
        'claimed': {'by': by, 'date': 5.0} if by else None,
        'message': message,
        **more,
    }


def kept(rev: str = '3-d', **more: Any) -> dict[str, Any]:
    return {**workitem.done(item(**more), 60.0, NOW, 'worker@host'), '_rev': rev}


def test_kept_message_is_neither_waiting_nor_dead_nor_claimed() -> None:
    doc = kept()
    assert (doc['started'], doc['finished'], doc['expires'], doc['worker']) == (5.0, NOW, NOW + 60, 'worker@host')
    assert workitem.is_done(doc)
    assert not workitem.is_waiting(doc)
    assert not workitem.is_dead(doc)
    assert workitem.claimant(doc) is None
    assert workitem.state(doc, NOW) == 'done'


def test_unproven_claim_of_a_done_message_is_deleted() -> None:
    """Whichever of the leaves CouchDB shows, and if the other claimant lives or not."""
    for winner, living in itertools.product(('2-b', '3-d'), (set(), {'us'}, {'us', 'them'})):
        assert decide([item(), kept()], winner, '2-b', living, NOW) == [{'_id': 'x', '_rev': '2-b', '_deleted': True}]


@pytest.mark.parametrize('by', [None, 'gone'])
@pytest.mark.parametrize('rev', ['2-b', '9-b'])
def test_conflict_with_a_done_message_keeps_it(by: str | None, rev: str) -> None:
    leaves = [item(rev, by), kept(), {**item('4-e'), 'status': 'fail', 'claimed': None}]
    for order in itertools.permutations(leaves):
        changes = resolve(list(order), set(), NOW) or []
        assert {change['_rev'] for change in changes} == {rev, '4-e'}
        assert all(change.get('_deleted') and not change.get('void') for change in changes)
