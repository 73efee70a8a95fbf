"""Records in a cluster: of two regions that have decided about the same task, one runs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_couchdb.testing import Server
from kombu_couchdb.contrib.regions import region
from kombu_couchdb.couchdb.client import Client
from tests.regions import Regions, regions_on
from tests.support import items, leave_leaf


@pytest.fixture
def regions(server: Server, apache_couchdb: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Regions]:
    if not apache_couchdb:
        pytest.skip('the embedded server returns one leaf revision')
    monkeypatch.setattr(Client, 'is_cluster', lambda self: True)
    with regions_on(server, 'us', 'eu') as regions:
        yield regions


@pytest.mark.parametrize('shown', ['there', 'withdrawn'])
@pytest.mark.parametrize('runs_there', [False, True])
def test_task_that_was_taken_and_withdrawn_runs_once(regions: Regions, shown: str, runs_there: bool) -> None:
    """One of the two writes was unproven. Only the other one was acted upon."""
    us, eu = regions['us'], regions['eu']
    us.app.send_task('add', (1, 2), region='eu', fallback='us', fallback_after=3600)
    [record] = us.records('eu')
    if runs_there:
        regions.work('eu', 'us')
    else:
        us.regions.bulk([region.there(record, 5.0)])
    [record] = us.records('eu')
    other = 'f' * 32 if shown == 'withdrawn' else '0' * 32
    leave_leaf(us.regions, record['_id'], f'2-{other}', **without_rev(region.withdrawn(record, 'us')))
    assert region.state_of(us.records('eu')[0]) == shown
    for pair in (('us', 'eu'), ('eu', 'us'), ('us', 'eu'), ('eu', 'us')):
        regions.work(*pair)
    assert (len(items(us.broker)), len(items(eu.broker))) == ((0, 1) if runs_there else (1, 0))
    assert [region.state_of(doc) for doc in us.records('eu')] == (['there'] if runs_there else [])


def without_rev(doc: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in doc.items() if name not in ('_rev', '_id')}
