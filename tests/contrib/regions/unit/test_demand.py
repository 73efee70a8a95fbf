"""How many tasks a region asks for (`celery_couchdb.contrib.regions.lending`)."""

from __future__ import annotations

import pytest

from celery_couchdb.contrib.regions.lending import Load, wanted
from kombu_couchdb.contrib.regions import region


@pytest.mark.parametrize(
    ('own', 'before', 'count'),
    [(0, False, 4), (1, False, 3), (2, False, None), (2, True, 2), (3, True, 1), (4, True, None), (9, True, None)],
)
@pytest.mark.parametrize('lent', [0, 3, 50])
def test_region_begins_when_it_is_half_idle_and_ceases_when_it_is_busy(
    own: int, before: bool, count: int | None, lent: int
) -> None:
    """Tasks that were lent to it do not count: their home knows them."""
    found = wanted({'q': Load(4, own + lent, 0, False)}, {'q': lent}, {}, {'q'} if before else ())
    assert found == ({} if count is None else {'q': count})


def test_short_tasks_are_wanted_in_advance_up_to_a_maximum() -> None:
    loads = {name: Load(4, 1, 0, False) for name in 'qrs'}
    assert wanted(loads, {}, {'q': 0.1, 'r': 8.0, 's': 1000.0}, ()) == {'q': 4, 'r': 15, 's': 100}


def test_paused_queue_is_not_wanted() -> None:
    assert wanted({'q': Load(4, 0, 0, True)}, {}, {}, ()) == {}


def test_demand_has_an_end() -> None:
    assert region.wants_of({'want': {'q': 3}, 'until': 110.0}, 100.0) == ({'q': 3}, 10.0)
    for until in (None, 'x', True, [1]):
        assert region.wants_of({'want': {'q': 3}, 'until': until}, 100.0) == ({}, 0.0)
    for want in (None, 'x', {'q': 'x'}, {'q': -1}, [1]):
        assert region.wants_of({'want': want, 'until': 110.0}, 100.0)[0] == {}
