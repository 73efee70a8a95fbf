"""How many tasks a region asks for (`celery_couchdb.contrib.regions.lending`)."""

from __future__ import annotations

import pytest

from celery_couchdb.contrib.regions.lending import Load, wanted


@pytest.mark.parametrize(
    ('messages', 'before', 'count'),
    [(0, 0, 4), (1, 0, 3), (2, 0, None), (2, 4, 2), (3, 4, 1), (4, 4, None), (9, 4, None)],
)
def test_region_begins_when_it_is_half_idle_and_ceases_when_it_is_busy(
    messages: int, before: int, count: int | None
) -> None:
    found = wanted({'q': Load(4, messages)}, {'q': before} if before else {}, {'q': 1})
    assert found == ({} if count is None else {'q': count})


def test_number_is_a_multiple_of_the_idle_processes_up_to_a_maximum() -> None:
    loads = {'q': Load(4, 1), 'r': Load(40, 0)}
    assert wanted(loads, {}, {'q': 8, 'r': 32}) == {'q': 24, 'r': 100}
