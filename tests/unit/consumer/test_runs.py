"""The runs of a long queue (`kombu_couchdb.consumer.runs`)."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from kombu_couchdb.consumer.runs import Runs
from kombu_couchdb.design.rows import WaitingRow
from kombu_couchdb.leases.peers import Turns

NAMES = [f'consumer{number}' for number in range(8)]


def rows(first: int, end: int) -> list[WaitingRow]:
    return [WaitingRow(f'message{number:05}', 9, float(number), '1-a', planned=False) for number in range(first, end)]


def keys(page: list[WaitingRow], runs: Runs | None = None) -> dict[str, str]:
    runs = runs or Runs()
    runs.read(page, len(NAMES))
    return {row.id: runs.key(row.id) for row in page}


def test_messages_side_by_side_have_the_same_key() -> None:
    found = keys(rows(0, 1024))
    lengths = [len(list(run)) for _, run in groupby(found.values())]
    assert 4 < sum(lengths) / len(lengths) < 16
    assert len(set(found.values())) == len(lengths)


def test_key_is_the_id_at_the_end_of_the_run() -> None:
    found = keys(rows(0, 1024))
    assert all(key >= doc_id for doc_id, key in found.items())
    assert all(found[key] == key for key in found.values())


def test_consumers_have_similar_shares() -> None:
    turns = Turns(NAMES, NAMES[0])
    shares = Counter(turns.first(key) for key in keys(rows(0, 8192)).values())
    assert len(shares) == len(NAMES)
    assert all(512 < share < 1536 for share in shares.values())


def test_runs_are_the_same_when_messages_at_their_beginnings_are_claimed() -> None:
    before = keys(rows(0, 1024))
    left = [row for row in rows(0, 1024) if row.id == before[row.id] or int(row.id[-1]) % 2]
    assert keys(left) == {row.id: before[row.id] for row in left}


def test_pages_at_other_positions_have_the_same_runs() -> None:
    one, other = keys(rows(0, 1024)), keys(rows(500, 1524))
    agree = [doc_id for doc_id in one.keys() & other.keys() if one[doc_id] == other[doc_id]]
    assert len(agree) > 524 - 64  # all but the end of the first page, whose last run goes on


def test_in_a_short_queue_each_message_has_its_own_key() -> None:
    assert all(doc_id == key for doc_id, key in keys(rows(0, 200)).items())


def test_long_queue_stays_long_until_few_messages_are_left() -> None:
    runs = Runs()
    long = keys(rows(0, 1024), runs)
    end = keys(rows(924, 1024), runs)
    assert end == {doc_id: long[doc_id] for doc_id in end}
    assert all(doc_id == key for doc_id, key in keys(rows(1000, 1024), runs).items())


def test_messages_of_the_page_before_keep_their_keys() -> None:
    runs = Runs()
    first = keys(rows(0, 1024), runs)
    keys(rows(1024, 2048), runs)
    assert {doc_id: runs.key(doc_id) for doc_id in first} == first
    runs.clear()
    assert all(runs.key(doc_id) == doc_id for doc_id in first)
