"""Rules for unproven claims and for conflicts of messages (`kombu_couchdb.documents.conflict_rules`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from kombu_couchdb.documents import workitem
from kombu_couchdb.documents.conflict_rules import decide, keep_winner, resolve_item


def leaf(rev: str, by: str | None, **more: Any) -> dict[str, Any]:
    return {'_id': 'x', '_rev': rev, 'attempts': 1, 'claimed': {'by': by, 'date': 1.0} if by else None, **more}


NOW = 5.0
OURS = leaf('2-b', 'us')


def test_unproven_claim_of_a_completed_message_is_deleted() -> None:
    assert decide([OURS, leaf('3-a', None, _deleted=True)], '2-b', '2-b', {'us', 'them'}, NOW) == [
        {'_id': 'x', '_rev': '2-b', '_deleted': True}
    ]


def test_void_deletion_does_not_complete_a_message() -> None:
    [doc] = decide([OURS, leaf('3-a', None, _deleted=True, void=True)], '2-b', '2-b', {'us'}, NOW) or []
    assert not doc.get('_deleted')


def test_leaf_that_names_nothing_as_done_completes_no_unique_job() -> None:
    """A unique job whose message has no delivery tag: any member can write one."""
    job = {**OURS, 'key': 'k', 'queue': 'q'}
    other = leaf('3-a', None, _deleted=True)
    [doc] = decide([job, other], '2-b', '2-b', {'us'}, NOW) or []
    assert not doc.get('_deleted')
    assert resolve_item([{**job, 'claimed': None}, other], set(), NOW) == []


def test_message_is_released_once_in_any_order_of_decisions() -> None:
    """Three consumers have unproven claims. In any order of their decisions, the item is released once."""
    claims = {'2-a': 'a', '2-b': 'b', '2-c': 'c'}
    for order in itertools.permutations(claims):
        leaves = {rev: leaf(rev, by) for rev, by in claims.items()}
        released = 0
        pending = list(order)
        for rev in pending * 3:
            live = [item for item in leaves.values() if not item.get('_deleted')]
            seen = max((item['_rev'] for item in live), default=None)
            for doc in decide(leaves.values(), seen, rev, set(claims.values()), NOW) or []:
                released += not doc.get('_deleted')
                del leaves[doc['_rev']]
                leaves[f'3{doc["_rev"][1:]}'] = {**doc, '_rev': f'3{doc["_rev"][1:]}'}
        assert released == 1


def test_message_of_living_claimants_is_released_once_whoever_knows_of_its_claim() -> None:
    """Three living consumers have claims without a response. Each knows of its own, or only sweeps."""
    claims = {'a': '2-a', 'b': '2-b', 'c': '2-c'}
    living = set(claims)
    for count in range(4):
        for knowing in itertools.combinations(claims, count):
            for order in itertools.permutations(claims):
                leaves = {rev: leaf(rev, by) for by, rev in claims.items()}
                released = 0
                for name in order * 3:
                    seen = max(rev for rev, item in leaves.items() if not item.get('_deleted'))
                    for doc in (
                        decide(leaves.values(), seen, claims[name], living, NOW)
                        if name in knowing
                        else resolve_item(list(leaves.values()), living - {name}, NOW)
                    ) or []:
                        released += not doc.get('_deleted')
                        del leaves[doc['_rev']]
                        leaves[f'3{doc["_rev"][1:]}'] = {**doc, '_rev': f'3{doc["_rev"][1:]}'}
                live = [item['claimed'] for item in leaves.values() if not item.get('_deleted')]
                assert (released, live) == (1, [None])


def test_highest_claim_is_not_deleted_while_a_node_shows_a_lower_one() -> None:
    """The lower one gives way to it at the same moment."""
    lower = leaf('2-a', 'them')
    assert decide([OURS, lower], '2-a', '2-b', {'us', 'them'}, NOW) is None
    assert decide([OURS, lower], '2-a', '2-b', {'us'}, NOW) is None


# -- messages that are kept when they are completed (`keep_done`)

DONE = {
    **workitem.done(
        {**OURS, 'type': 'WorkItem', 'queue': 'q', 'message': {'headers': {}, 'body': ''}}, 60.0, NOW, None
    ),
    '_rev': '3-d',
}


def test_unproven_claim_of_a_done_message_is_deleted() -> None:
    """Whichever of the leaves CouchDB shows, and if the other claimant lives or not."""
    for winner, living in itertools.product(('2-b', '3-d'), (set[str](), {'us'}, {'us', 'them'})):
        assert decide([OURS, DONE], winner, '2-b', living, NOW) == [{'_id': 'x', '_rev': '2-b', '_deleted': True}]


def test_conflict_with_a_done_message_keeps_it() -> None:
    for rev, by in itertools.product(('2-b', '9-b'), (None, 'gone')):
        leaves = [leaf(rev, by), DONE, leaf('4-e', None, status='fail')]
        for order in itertools.permutations(leaves):
            changes = resolve_item(list(order), set(), NOW) or []
            assert {change['_rev'] for change in changes} == {rev, '4-e'}
            assert all(change.get('_deleted') and not change.get('void') for change in changes)


# -- unique jobs


def job(rev: str, by: str | None, task: str, *following: str, **more: Any) -> dict[str, Any]:
    behind = {'next': [entry(task) for task in following]} if following else {}
    return leaf(rev, by, key='k', **entry(task), **behind, **more)


def entry(task: str) -> dict[str, Any]:
    message = {'headers': {'id': task}, 'properties': {'delivery_tag': f'tag-{task}'}, 'body': ''}
    return {'priority': 0, 'date': None, 'published': float(ord(task)), 'message': message}


def tasks(doc: Mapping[str, Any]) -> list[str]:
    return [one['message']['headers']['id'] for one in (doc, *doc.get('next', ()))]


def test_completed_unique_job_gives_way_to_its_successor() -> None:
    ours, follows = job('2-b', 'us', 'a', 'b'), job('3-a', None, 'b', done='tag-a')
    for seen in ('2-b', '3-a'):
        assert decide([ours, follows], seen, '2-b', {'us'}, NOW) == [
            {'_id': 'x', '_rev': '2-b', '_deleted': True, 'done': 'tag-a'}
        ]
    # The other claim is of the same message, and a void deletion must not restore a message.
    assert decide([ours, job('2-c', 'them', 'a')], '2-c', '2-b', {'us', 'them'}, NOW) == [
        {'_id': 'x', '_rev': '2-b', '_deleted': True, 'void': True, 'done': 'tag-a'}
    ]


def test_end_of_an_earlier_run_does_not_complete_this_one() -> None:
    earlier = {'_id': 'x', '_rev': '3-a', '_deleted': True, 'done': 'tag-z'}
    [released] = decide([job('5-b', 'us', 'a'), earlier], '5-b', '5-b', {'us'}, NOW) or []
    assert (tasks(released), released['claimed']) == (['a'], None)
    assert resolve_item([job('5-b', None, 'a'), earlier], set(), NOW) == []


def test_job_sent_during_an_unproven_claim_still_runs() -> None:
    done = {'_id': 'x', '_rev': '3-a', '_deleted': True, 'done': 'tag-a'}
    for changes in (
        decide([job('4-b', 'us', 'a', 'c'), done], '4-b', '4-b', {'us'}, NOW),
        resolve_item([job('4-b', 'dead', 'a', 'c'), done], set(), NOW),
    ):
        [doc] = changes or []
        assert (tasks(doc), doc['claimed'], doc.get('_deleted')) == (['c'], None, None)


def test_jobs_sent_on_both_sides_of_a_partition_run_in_turn() -> None:
    kept, gone = resolve_item([job('1-b', None, 'b'), job('1-a', None, 'a', 'c')], set(), NOW) or []
    assert (kept['_rev'], tasks(kept)) == ('1-b', ['b', 'a', 'c'])
    assert (gone['_rev'], gone['_deleted'], gone['void']) == ('1-a', True, True)


def test_messages_behind_a_hidden_claim_run_after_the_job_that_another_consumer_holds() -> None:
    kept, gone = resolve_item([job('2-a', 'us', 'a', 'c'), job('2-b', 'them', 'a')], {'them'}, NOW) or []
    assert (kept['_rev'], tasks(kept), kept['claimed']['by']) == ('2-b', ['a', 'c'], 'them')
    assert (gone['_rev'], gone['_deleted'], gone['void']) == ('2-a', True, True)


# -- conflicts left by others


def test_completion_wins_over_all_other_leaves() -> None:
    done = {'_id': 'x', '_rev': '3-a', '_deleted': True}
    left = [leaf('2-c', 'dead'), leaf('4-b', None), leaf('2-d', None, status='fail')]
    assert resolve_item([done, *left], set(), NOW) == [
        {'_id': 'x', '_rev': rev, '_deleted': True} for rev in ('2-c', '4-b', '2-d')
    ]
    assert resolve_item([leaf('2-c', 'them'), done], {'them'}, NOW) is None  # the holder's own ack deletes this leaf


def test_claims_of_running_consumers_are_not_changed() -> None:
    assert resolve_item([leaf('2-c', 'dead'), leaf('2-b', 'them')], {'them'}, NOW) is None
    assert resolve_item([leaf('2-c', 'us'), leaf('2-b', 'them')], {'us', 'them'}, NOW) is None
    [gone] = resolve_item([leaf('2-c', 'them'), leaf('2-b', 'dead')], {'them'}, NOW) or []
    assert (gone['_rev'], gone['void']) == ('2-b', True)


def test_concurrent_resolvers_with_different_leaves_lose_no_message() -> None:
    """For any two leaves that each resolver sees, in any order, exactly one leaf is left in the end."""
    all_leaves = [leaf('2-a', 'dead'), leaf('2-b', None), leaf('3-c', 'dead'), leaf('2-d', None, status='fail')]
    for first, second in itertools.permutations(itertools.combinations(all_leaves, 2), 2):
        stored = {doc['_rev']: doc for doc in all_leaves}
        plans = [resolve_item(list(seen), set(), NOW) or [] for seen in (first, second)]
        for plan in plans:
            for doc in plan:
                if doc['_rev'] not in stored:
                    break  # a conflict: the resolver skips the other documents
                del stored[doc['_rev']]
                generation, _, text = doc['_rev'].partition('-')
                stored[f'{int(generation) + 1}-{text}'] = {**doc, '_rev': f'{int(generation) + 1}-{text}'}
        while changes := resolve_item(list(stored.values()), set(), NOW):
            for doc in changes:
                del stored[doc['_rev']]
                generation, _, text = doc['_rev'].partition('-')
                stored[f'{int(generation) + 1}-{text}'] = {**doc, '_rev': f'{int(generation) + 1}-{text}'}
        assert [doc.get('status') for doc in stored.values() if not doc.get('_deleted')] == ['fail']


def test_winning_leaf_of_equal_documents_is_kept() -> None:
    assert keep_winner([leaf('2-c', None), leaf('3-a', None), leaf('4-z', None, _deleted=True)]) == [
        {'_id': 'x', '_rev': '2-c', '_deleted': True, 'void': True}
    ]
