"""Rates: headers, the arithmetic of starts, and documents."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kombu_couchdb.documents import concurrency, rates, workitem
from kombu_couchdb.documents.conflict_rules import keep_winner
from kombu_couchdb.documents.rates import RateLimit


def item(rate: Any = '10/s', key: Any = 'k') -> Any:
    message = {'body': '', 'headers': {'rate': rate, 'rate_key': key}, 'properties': {}}
    return {**workitem.new('id', 'q', message, 1.0), '_rev': '1-a'}


@pytest.mark.parametrize(
    ('given', 'most', 'period'),
    [('10/s', 10, 1), ('100/m', 100, 60), ('5/h', 5, 3600), ('2', 2, 1), (10, 10, 1), (0.5, 1, 2), ('1.5/m', 1, 40)],
)
def test_rate_of_an_item(given: Any, most: int, period: float) -> None:
    rate = rates.rate_of(item(given))
    assert rate is not None
    assert (rate.key, rate.most) == ('k', most)
    assert rate.period == pytest.approx(period)


@pytest.mark.parametrize(
    'rate',
    ['10/s\n', '10/seconds', ' 10/s', '10 /s', '1e3', '-1', '٣/s', '', '0', 0, True, -1, 1001, '1001/s', 1e-9, 10**400]
    + [float('nan'), float('inf'), None, ['10/s']],
)
def test_invalid_rate(rate: Any) -> None:
    assert 'the header rate must be a rate from one a day to 1,000 a second' in str(
        rates.rate_problem({'rate': rate, 'rate_key': 'k'})
    )


@pytest.mark.parametrize(
    'rate', [RateLimit('k', 1, 1), RateLimit('k', 5, 1), RateLimit('k', 100, 1), RateLimit('k', 100, 60)]
)
@pytest.mark.parametrize('late', [0.0, 0.04, 3.0])
def test_no_period_has_more_starts_than_the_rate(rate: RateLimit, late: float) -> None:
    """Consumers take all starts that there are, at random times which are `late` at most."""
    chance = random.Random(1)
    now, next_, starts = 1000.0, 1000.0, list[float]()
    while len(starts) < 3 * rate.most + 5:
        now = max(now, next_ - rates.BURST_SECONDS) + chance.uniform(0.0, late)
        while rates.has_start(next_, now):
            starts.append(now)
            next_ = rates.after(next_, rate, now)
    spans = [end - begin for begin, end in zip(starts, starts[rate.most :], strict=False)]
    assert min(spans) >= rate.period - 1e-6
    if late < rates.BURST_SECONDS:  # and no more is lost than the distance
        assert starts[-1] - starts[0] <= (len(starts) - 1) * rate.interval + 1e-6


def test_leaf_with_the_latest_start_is_kept() -> None:
    leaves = [
        {'_id': 'rate:k', '_rev': rev, 'next': next_} for rev, next_ in (('2-a', 9.0), ('2-b', 5.0), ('2-c', 'x'))
    ]
    assert {leaf['_rev'] for leaf in keep_winner(leaves, rates.order)} == {'2-b', '2-c'}
    assert keep_winner(leaves[:1], rates.order) == []


@pytest.mark.parametrize(('queue', 'key'), [('celery', 'k'), ('a:b', 'x:y'), ('é/%3A', 'rate:'), ('', 'k')])
def test_parked_key(queue: str, key: str) -> None:
    parked = rates.parked_key(key, queue)
    assert rates.queue_and_key(parked) == (queue, key)
    assert not rates.waits_for_slot(concurrency.park(item(), parked, 1.0))
