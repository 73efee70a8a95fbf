"""What a worker counts of its tasks (`celery_couchdb.contrib.metrics.counters`)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from celery_couchdb.contrib.metrics.counters import MAX_TASKS, OTHER, Counters, counts_in, since_in


def test_counts_are_read_as_they_were_written() -> None:
    counters = Counters()
    assert counters.document() is None
    for seconds in (0.004, 0.01, 0.011, 4.0, 5000.0):
        counters.begin('pay', seconds * 2)
        counters.end('pay', 'succeeded', seconds)
    counters.end('pay', 'failed', 0.5)
    counters.end('mail', 'revoked', None)
    document = json.loads(json.dumps(counters.document()))
    assert document['counts'] == {
        'pay': {
            'succeeded': 5,
            'failed': 1,
            'run': {'sum': 5004.525, '0.01': 2, '0.05': 1, '0.5': 1, '5': 1, '+Inf': 1},
            'waited': {'sum': 10008.05, '0.01': 1, '0.05': 2, '30': 1, '+Inf': 1},
        },
        'mail': {'revoked': 1},
    }
    read = counts_in(document)
    assert {task: counts.document() for task, counts in read.items()} == document['counts']
    assert since_in(document) == document['since'] > 0


def test_number_of_names_is_limited() -> None:
    counters = Counters()
    for number in range(MAX_TASKS + 50):
        counters.end(f'task {number}', 'succeeded', 1.0)
    counters.end('x' * 1000, 'failed', None)
    counters.end('task 0', 'succeeded', 1.0)
    counts = (counters.document() or {})['counts']
    assert len(counts) == MAX_TASKS + 1
    assert (counts[OTHER]['succeeded'], counts[OTHER]['failed'], counts['task 0']['succeeded']) == (50, 1, 2)


@pytest.mark.parametrize(
    'tasks',
    [
        None,
        5,
        [],
        {'since': 'now', 'counts': 'all'},
        {'since': -1, 'counts': {'a': 5, 'b': []}},
        {
            'counts': {
                'a': {'succeeded': 'many', 'failed': True, 'retried': -1, 'run': 7, 'waited': {'sum': {}, '1': []}}
            }
        },
        {'counts': {'a': {'succeeded': float('nan'), 'run': {'sum': 1e400, '0.01': -1e400}}}},
    ],
)
def test_malformed_counts_are_nothing(tasks: Any) -> None:
    assert since_in(tasks) == 0
    assert not any(counts.document() for counts in counts_in(tasks).values())


def test_huge_counts_are_bounded() -> None:
    assert counts_in({'counts': {'a': {'succeeded': 1e300}}})['a'].outcomes['succeeded'] == 10**15


def test_times_that_cannot_be_right_are_not_counted() -> None:
    """A date in a message may be any number, and the sum of two of them infinite."""
    counters = Counters()
    for waited in (1e308, 1e308, float('inf'), float('nan'), -1.0, 2.0):
        counters.begin('pay', waited)
    assert counters.document() is not None
    assert json.loads(json.dumps(counters.document(), allow_nan=False))['counts']['pay']['waited'] == {
        'sum': 2.0,
        '5': 1,
    }
