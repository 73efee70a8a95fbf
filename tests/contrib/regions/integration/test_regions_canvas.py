"""Chords, groups and chains with regions: what is an error when it is sent, and a task in every region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, chain, chord, group

from celery_couchdb.contrib.regions import everywhere
from kombu_couchdb.errors import ConfigurationError
from tests.contrib.regions.integration.test_regions import regions
from tests.regions import Regions
from tests.support import items

__all__ = ['regions']


@pytest.fixture
def app(regions: Regions) -> Celery:
    return regions['us'].app


FORMS: dict[str, Callable[[Any, Any], Any]] = {
    'header': lambda at, far: chord([at(), far()], at()),
    'route': lambda at, far: chord([at(), far(name='tasks.far', region=None)], at()),
    'upgraded': lambda at, far: group([at(), far()]) | at(),
    'in a chain': lambda at, far: at() | group([at(), far()]) | at(),
    'first step': lambda at, far: chord([at(), far() | at()], at()),
    'last step': lambda at, far: chord([at(), at() | far()], at()),
    'inner body': lambda at, far: chord([at(), chord([at(), at()], far())], at()),
    'inner group': lambda at, far: chord([at(), group([at(), far()])], at()),
    'generator': lambda at, far: chord((sent() for sent in (at, far)), at()),
    'a header of the message': lambda at, far: chord([at(), far(region=None, headers={'x-region': 'eu'})], at()),
}


def test_chord_in_another_region_is_an_error_when_it_is_sent(regions: Regions, app: Celery) -> None:
    app.conf.task_routes = {'tasks.far': {'region': 'eu'}}
    add = app.signature('add', (1,))

    def far(name: str = 'add', **options: Any) -> Any:
        return app.signature(name, (1,)).set(**{'region': 'eu', **options})

    for form, make in FORMS.items():
        sent = make(lambda: app.signature('add', (1,)), far)
        if form == 'in a chain':
            sent.tasks = sent.tasks[1:]  # the worker that ends the first step sends this
        with pytest.raises(ConfigurationError, match="header of a chord names region 'eu'"):
            sent.apply_async()
    with pytest.raises(ConfigurationError, match="header of a chord names region 'eu'"):
        chord([add, add], add).apply_async(region='eu')
    with pytest.raises(ConfigurationError, match="header of a chord names region 'eu'"):
        chord([add, add], add).set(region='eu').apply_async()
    assert items(regions['us'].broker) == [] == regions['us'].records()
    assert [row['id'] for row in regions['us'].results.id_range('') if not row['id'].startswith('_')] == []


def test_body_of_a_chord_may_name_a_region(regions: Regions, app: Celery) -> None:
    add = app.signature('add', (1,))
    chord([add, add], add.clone().set(region='eu')).apply_async()
    assert len(items(regions['us'].broker)) == 2
    assert regions['us'].records() == []


def test_task_in_every_region(regions: Regions, app: Celery) -> None:
    signature = app.signature('add', (1, 2)).set(queue='news')
    result = everywhere(signature).apply_async()
    [item], [record] = items(regions['us'].broker), regions['us'].records()
    assert (item['queue'], record['routing_key'], record['_id'].split(':')[1]) == ('news', 'news', 'eu')
    assert [child.id for child in result.children] == [record['id'], item['message']['headers']['id']]
    assert 'region' not in signature.options
    chain(signature, everywhere(app.signature('add', (3,))))  # it is a group like others


def test_every_region_needs_regions() -> None:
    with pytest.raises(ConfigurationError, match='needs the transport option regions'):
        everywhere(Celery('alone', broker='couchdb://').signature('add'))
