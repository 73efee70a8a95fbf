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


def turns(order: ClaimOrder, names: Sequence[str] = MESSAGES) -> list[int]:
    return [order.of(name)[0] for name in names]


def sharing(own: str, first: int, end: int) -> ClaimOrder:
    order = order_of(own)
    order.read(rows(first, end))
    return order


def test_consumer_that_is_alone_waits_for_nobody() -> None:
    order = ClaimOrder()
    order.read(rows(0, 400))
    assert {order.of(name) for name in MESSAGES} == {(0, 0.0)}
    assert (order.position, order.consumers, order.is_shared) == (0, 1, False)


def test_without_listeners_nobody_waits() -> None:
    assert {order_of(NAMES[0], listeners=[]).of(name) for name in MESSAGES} == {(0, 0.0)}


def test_news_are_told() -> None:
    order = order_of(NAMES[0])
    assert not order.set_consumers(NAMES[0], NAMES, NAMES)
    assert order.set_consumers(NAMES[0], NAMES, NAMES[:2])
    assert order.set_consumers(NAMES[0], NAMES[:4], NAMES[:2])


# -- few messages: the listeners


def test_few_messages_are_for_the_listeners() -> None:
    orders = [order_of(name, NAMES[2:5]) for name in NAMES[2:5]]
    for order in orders:
        order.read(rows(0, 7))
        assert not order.is_shared
    for name in MESSAGES:
        assert sorted(order.of(name) for order in orders) == [
            (0, 0.0),
            (1, pytest.approx(0.1)),
            (2, pytest.approx(0.158, abs=0.001)),
        ]
    assert all(100 < turns(order).count(0) < 170 for order in orders)


def test_other_consumers_come_after_all_listeners() -> None:
    order = order_of(NAMES[0], NAMES[2:5])
    found = [order.of(name) for name in MESSAGES]
    assert {turn for turn, _ in found} == {3}
    assert all(0.2 <= wait <= 0.22 for _, wait in found)
    assert len({wait for _, wait in found}) > 100  # they do not know of each other, so not all claim at once


def test_listeners_that_left_messages_to_others_get_only_a_moment() -> None:
    order = order_of(NAMES[0], NAMES[:2])
    others = [name for name in MESSAGES if order.of(name)[0] == 1]
    assert order.won(others[0])
    assert {order.of(name) for name in others} == {(0, 0.01)}
    assert not order.won(others[1])


def test_listener_that_claims_again_is_not_busy() -> None:
    order = order_of(NAMES[0], NAMES[:2])
    others = [name for name in MESSAGES if order.of(name)[0] == 1]
    order.won(others[0])
    assert order.lost(others[1], None)
    assert {order.of(name)[0] for name in others} == {1}
    order.won(others[0])
    assert order.lost(others[1], NAMES[1])
    assert not order.lost(others[1], NAMES[1])


def test_own_message_tells_nothing_of_others() -> None:
    order = order_of(NAMES[0], NAMES[:2])
    own = next(name for name in MESSAGES if order.of(name)[0] == 0)
    assert not order.won(own)


def test_busy_consumer_that_is_no_listener_any_more_is_forgotten() -> None:
    order = order_of(NAMES[0], NAMES[:2])
    other = next(name for name in MESSAGES if order.of(name)[0] == 1)
    order.won(other)
    order.set_consumers(NAMES[0], NAMES, NAMES[:1])
    order.set_consumers(NAMES[0], NAMES, NAMES[:2])
    assert order.of(other)[0] == 1


# -- more messages: all consumers


def test_each_consumer_is_first_for_a_share_and_the_others_follow_by_powers_of_two() -> None:
    orders = [sharing(name, 0, 100) for name in NAMES]
    assert all(order.is_shared for order in orders)
    for name in MESSAGES[:100]:
        found = sorted(order.of(name) for order in orders)
        assert [turn for turn, _ in found] == list(range(8))
        assert [found[turn][1] for turn in (0, 1, 3, 7)] == [0.0, 0.25, 0.5, 0.75]
    assert Counter(turns(orders[0], MESSAGES[:100])).keys() == set(range(8))


def test_among_a_thousand_consumers_the_last_waits_for_seconds_only() -> None:
    many = [f'forged{number:04}' for number in range(1000)]
    order = order_of(many[0], many[:2], many)
    order.read(rows(0, 400))
    assert max(order.of(name)[1] for name in MESSAGES) <= 2.5


def test_claims_of_shared_messages_tell_nothing_of_listeners() -> None:
    order = sharing(NAMES[0], 0, 100)
    other = next(name for name in MESSAGES if order.of(name)[0] == 3)
    assert not order.won(other)


def test_order_forgets_messages() -> None:
    order = sharing(NAMES[0], 0, 100)
    order.clear()
    assert not order.is_shared


# -- long queues: messages side by side have the same order


def keys(first: int, end: int) -> list[int]:
    return turns(sharing(NAMES[0], first, end), [row.id for row in rows(first, end)])


def test_messages_side_by_side_have_the_same_order() -> None:
    lengths = [len(list(run)) for _, run in groupby(keys(0, 1024))]
    assert 6 < sum(lengths) / len(lengths) < 18


def test_consumers_have_similar_shares_of_a_long_queue() -> None:
    shares = Counter(keys(0, 8192))
    assert len(shares) == len(NAMES)
    assert all(512 < share < 1536 for share in shares.values())


def test_order_is_the_same_on_pages_at_other_positions() -> None:
    pairs = list(zip(keys(0, 1024)[500:], keys(500, 1524), strict=False))
    assert (
        sum(one == other for one, other in pairs) > 524 - 64
    )  # all but the end of the first page, whose last run goes on


def test_order_is_the_same_when_messages_at_the_beginnings_are_claimed() -> None:
    before = dict(zip((row.id for row in rows(0, 1024)), keys(0, 1024), strict=True))
    order = order_of(NAMES[0])
    order.read([row for row in rows(0, 1024) if before[row.id] or int(row.id[-1]) % 2])
    left = [name for name in before if before[name]]
    assert turns(order, left) == [before[name] for name in left]


def test_in_a_short_queue_each_message_has_its_own_order() -> None:
    lengths = [len(list(run)) for _, run in groupby(keys(0, 200))]
    assert sum(lengths) / len(lengths) < 2


def test_long_queue_stays_long_until_few_messages_are_left() -> None:
    order = sharing(NAMES[0], 0, 1024)
    long = turns(order, [row.id for row in rows(924, 1024)])
    order.read(rows(924, 1024))
    assert turns(order, [row.id for row in rows(924, 1024)]) == long
    order.read(rows(1000, 1024))
    order.read(rows(1000, 1024))
    short = sharing(NAMES[0], 1000, 1024)
    names = [row.id for row in rows(1000, 1024)]
    assert turns(order, names) == turns(short, names)


def test_messages_of_the_page_before_keep_their_order() -> None:
    order = sharing(NAMES[0], 0, 1024)
    names = [row.id for row in rows(0, 1024)]
    before = turns(order, names)
    order.read(rows(1024, 2048))
    assert turns(order, names) == before
