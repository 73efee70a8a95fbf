"""Conflict rules of results (`celery_couchdb.results.documents`)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from celery_couchdb.results.documents import keep_best


def leaf(generation: int, status: str, *delivery: int) -> dict[str, Any]:
    return {
        '_id': 'r',
        '_rev': f'{generation}-a',
        'type': 'Result',
        'status': status,
        **({'delivery': list(delivery)} if delivery else {}),
    }


@pytest.mark.parametrize(
    'leaves',
    [
        [
            leaf(9, 'STARTED', 0, 0, 2),
            leaf(3, 'FAILURE', 0, 0, 2),
            leaf(2, 'STARTED', 0, 0, 4),
            leaf(1, 'SUCCESS', 0, 0, 2),
        ],
        [leaf(2, 'FAILURE'), leaf(1, 'FAILURE', 0, 0, 2), leaf(1, 'FAILURE', 0, 0, 10), leaf(1, 'RETRY', 0, 1, 2)],
        [leaf(2, 'STARTED'), leaf(3, 'STARTED'), leaf(2, 'FAILURE')],
        [{**leaf(2, 'FAILURE'), 'delivery': 'spoilt'}, leaf(1, 'FAILURE', 0, 0, 2)],
    ],
    ids=['states', 'deliveries', 'no deliveries', 'spoilt'],
)
def test_highest_ranked_leaf_is_kept_in_any_order(leaves: list[dict[str, Any]]) -> None:
    for number, doc in enumerate(leaves):
        doc['_rev'] += str(number)  # each document is another leaf revision
    for found in itertools.permutations(leaves):
        assert {doc['_rev'] for doc in keep_best([*found])} == {doc['_rev'] for doc in leaves[:-1]}
