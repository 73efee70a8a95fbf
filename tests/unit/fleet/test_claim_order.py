"""The order in which the consumers of a queue may claim its messages (`kombu_couchdb.fleet.claim_order`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

import pytest

from kombu_couchdb.design.rows import WaitingRow
from kombu_couchdb.fleet.claim_order import ClaimOrder

NAMES = [f'consumer{number}' for number in range(8)]
MESSAGES = [f'message{number:05}' for number in range(400)]


def rows(first: int, end: int) -> list[WaitingRow]:
    return [WaitingRow(f'message{number:05}', 9, float(number), '1-a', planned=False) for number in range(first, end)]


def order_of(own: str, listeners: Sequence[str] = NAMES, consumers: Sequence[str] = NAMES) -> ClaimOrder:
    order = ClaimOrder()
    order.set_consumers(own, consumers, listeners)
    return order


def turns(order: ClaimOrder, page: Sequence[WaitingRow]) -> list[int]:
    """Let a consumer read a page; return how many others may claim each of its messages before."""
    return [order.turn_of(key)[0] for key in order.read(page)]


def test_consumer_that_is_alone_and_one_without_listeners_wait_for_nobody() -> None:
    alone = ClaimOrder()
    alone.read(rows(0, 400))
    assert not alone.is_shared
    for order in (alone, order_of(NAMES[0], listeners=[])):
        assert {order.turn_of(name) for name in MESSAGES} == {(0, 0.0)}


# -- few messages: the listeners


def test_few_messages_are_for_the_listeners() -> None:
    orders = [order_of(name, NAMES[2:5]) for name in NAMES[2:5]]
    for order in orders:
        order.read(rows(0, 7))
        assert 100 < [order.turn_of(name)[0] for name in MESSAGES].count(0) < 170
    for name in MESSAGES:
        found = sorted(order.turn_of(name) for order in orders)
        assert found == [(0, 0.0), (1, pytest.approx(0.1)), (2, pytest.approx(0.158, abs=0.001))]


def test_other_consumers_come_after_all_listeners() -> None:
    order = order_of(NAMES[0], NAMES[2:5])
    found = [order.turn_of(name) for name in MESSAGES]
    assert {turn for turn, _ in found} == {3}
    assert all(0.2 <= wait <= 0.22 for _, wait in found)
    assert len({wait for _, wait in found}) > 100  # they do not know of each other, so not all claim at once


def test_listener_that_leaves_messages_to_others_gets_only_a_moment_until_it_claims_again() -> None:
    order = order_of(NAMES[0], NAMES[:2])
    others = [name for name in MESSAGES if order.turn_of(name)[0] == 1]
    assert not order.won(next(name for name in MESSAGES if name not in others))  # tells nothing of the other one
    for claimed_by in (None, NAMES[1]):
        assert order.won(others[0])
        assert {order.turn_of(name) for name in others} == {(0, 0.01)}
        assert not order.won(others[1])
        assert order.lost(others[1], claimed_by)
        assert {order.turn_of(name)[0] for name in others} == {1}
    order.won(others[0])
    for listeners in (NAMES[:1], NAMES[:2]):  # it is no listener for some time
        order.set_consumers(NAMES[0], NAMES, listeners)
    assert order.turn_of(others[0])[0] == 1


# -- more messages: all consumers


def test_each_consumer_is_first_for_a_share_and_the_others_follow_by_powers_of_two() -> None:
    orders = [order_of(name) for name in NAMES]
    for order in orders:
        assert set(turns(order, rows(0, 100))) == set(range(8))
        assert order.is_shared
    for name in MESSAGES[:100]:
        found = sorted(order.turn_of(name) for order in orders)
        assert [turn for turn, _ in found] == list(range(8))
        assert [found[turn][1] for turn in (0, 1, 3, 7)] == [0.0, 0.25, 0.5, 0.75]
    other = next(name for name in MESSAGES if orders[0].turn_of(name)[0] == 3)
    assert not orders[0].won(other)  # this tells nothing of the listeners
    orders[0].clear()
    assert not orders[0].is_shared


def test_among_a_thousand_consumers_the_last_waits_for_seconds_only() -> None:
    many = [f'forged{number:04}' for number in range(1000)]
    order = order_of(many[0], many[:2], many)
    order.read(rows(0, 400))
    assert max(order.turn_of(name)[1] for name in MESSAGES) <= 2.5


# -- long queues: messages side by side have the same order


@pytest.mark.parametrize(('number', 'least', 'most'), [(1024, 6, 18), (200, 1, 2)], ids=['long', 'short'])
def test_messages_side_by_side_have_the_same_order_in_a_long_queue(number: int, least: int, most: int) -> None:
    lengths = [len(list(run)) for _, run in groupby(turns(order_of(NAMES[0]), rows(0, number)))]
    assert least <= sum(lengths) / len(lengths) < most


def test_consumers_have_similar_shares_of_a_long_queue() -> None:
    shares = Counter(turns(order_of(NAMES[0]), rows(0, 8192)))
    assert len(shares) == len(NAMES)
    assert all(512 < share < 1536 for share in shares.values())
