"""What a consumer does about a claim that a cluster did not prove (`kombu_couchdb.void`)."""

from __future__ import annotations

from typing import Any

from kombu_couchdb.void import decide


def leaf(rev: str, by: str | None, **more: Any) -> dict[str, Any]:
    return {'_id': 'x', '_rev': rev, 'attempts': 1, 'claimed': {'by': by, 'date': 1.0} if by else None, **more}


OURS = leaf('2-b', 'us')


def test_alone_it_is_released_and_does_not_count() -> None:
    [doc] = decide([OURS], '2-b', '2-b', {'us'}) or []
    assert doc['_rev'] == '2-b'
    assert doc['claimed'] is None
    assert doc['attempts'] == 0


def test_done_elsewhere_it_is_deleted() -> None:
    assert decide([OURS, leaf('3-a', None, _deleted=True)], '2-b', '2-b', {'us', 'them'}) == [
        {'_id': 'x', '_rev': '2-b', '_deleted': True}]


def test_void_deletions_of_others_do_not_mean_done() -> None:
    [doc] = decide([OURS, leaf('3-a', None, _deleted=True, void=True)], '2-b', '2-b', {'us'}) or []
    assert not doc.get('_deleted')


def test_unseen_it_is_deleted_as_void() -> None:
    assert decide([OURS, leaf('2-c', 'them')], '2-c', '2-b', {'us', 'them'}) == [
        {'_id': 'x', '_rev': '2-b', '_deleted': True, 'void': True}]


def test_seen_it_waits_for_a_living_rival() -> None:
    assert decide([OURS, leaf('2-a', 'them')], '2-b', '2-b', {'us', 'them'}) is None


def test_seen_it_is_released_when_the_rival_is_dead() -> None:
    released, voided = decide([OURS, leaf('2-a', 'them')], '2-b', '2-b', {'us'}) or []
    assert released['_rev'] == '2-b'
    assert released['claimed'] is None
    assert voided == {'_id': 'x', '_rev': '2-a', '_deleted': True, 'void': True}


def test_gone_there_is_nothing_to_do() -> None:
    assert decide([leaf('3-b', 'us')], '3-b', '2-b', {'us'}) == []


def test_however_all_losers_decide_one_leaf_stays() -> None:
    """Three consumers, none of them told a clean ok: whoever decides in whatever order, the item is released once."""
    import itertools
    claims = {'2-a': 'a', '2-b': 'b', '2-c': 'c'}
    for order in itertools.permutations(claims):
        leaves = {rev: leaf(rev, by) for rev, by in claims.items()}
        released = 0
        pending = list(order)
        for rev in pending * 3:
            live = [item for item in leaves.values() if not item.get('_deleted')]
            seen = max((item['_rev'] for item in live), default=None)
            for doc in decide(leaves.values(), seen, rev, set(claims.values())) or []:
                released += not doc.get('_deleted')
                del leaves[doc['_rev']]
                leaves[f'3{doc["_rev"][1:]}'] = {**doc, '_rev': f'3{doc["_rev"][1:]}'}
        assert released == 1


def test_unique_job_that_another_has_done_makes_way_for_what_follows_it() -> None:
    def job(rev: str, by: str | None, task: str, **more: Any) -> dict[str, Any]:
        return leaf(rev, by, key='k', message={'headers': {'id': task}}, **more)

    ours, follows = job('2-b', 'us', 'a', next=[{'message': {'headers': {'id': 'b'}}}]), job('3-a', None, 'b')
    for seen in ('2-b', '3-a'):
        assert decide([ours, follows], seen, '2-b', {'us'}) == [{'_id': 'x', '_rev': '2-b', '_deleted': True}]
    # A claim of the same message is a rival's, and what is deleted as void brings nothing to life.
    assert decide([ours, job('2-c', 'them', 'a')], '2-c', '2-b', {'us', 'them'}) == [
        {'_id': 'x', '_rev': '2-b', '_deleted': True, 'void': True}]
