"""Names of regions, and what a message says about them."""

from __future__ import annotations

from typing import Any

import pytest
from celery.app.task import Context

from celery_couchdb.contrib.regions.room import RegionsRoom
from kombu_couchdb.contrib.regions import region
from kombu_couchdb.errors import ConfigurationError
from kombu_couchdb.options import Options

URLS = {'us': 'couchdb://celery:secret@us:5984/celery_regions', 'eu': 'couchdbs://a:1/db;couchdbs://b:2/db'}


def message(headers: Any = None, **properties: Any) -> dict[str, Any]:
    return {'body': '', 'headers': headers, 'properties': properties}


@pytest.mark.parametrize('name', ['', 'any', 'EU', 'e:u', 'x' * 31, 7, 'eu\n'])
def test_wrong_name(name: Any) -> None:
    with pytest.raises(ConfigurationError, match='names of regions'):
        Options.of({'region': name, 'regions': URLS})


@pytest.mark.parametrize(
    ('given', 'text'),
    [
        ({'region': 'us'}, 'need each other'),
        ({'regions': URLS}, 'need each other'),
        ({'region': 'asia', 'regions': URLS}, "no URL for region 'asia'"),
        ({'region': 'us', 'regions': ['us']}, 'must map'),
        ({'region': 'us', 'regions': {'us': 'http://user:secret@us'}}, 'must have a URL'),
    ],
)
def test_wrong_options_are_named_without_passwords(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text) as caught:
        Options.of(given)
    assert 'secret' not in str(caught.value)


@pytest.mark.parametrize(
    ('name', 'given', 'text'),
    [
        (None, {'fallback': 'eu'}, 'fallback needs the name of a region in region'),
        ('any', {'fallback': 'eu'}, 'fallback needs the name of a region in region'),
        ('eu', {'fallback': 'eu'}, 'fallback must be another one of the regions'),
        ('eu', {'fallback': 'asia'}, 'fallback must be another one of the regions'),
        ('eu', {'fallback_after': 5}, 'fallback must be another one of the regions'),
        *(
            ('eu', {'fallback': 'us', 'fallback_after': value}, 'a number of seconds above 0')
            for value in (0, 1e10, '5')
        ),
    ],
)
def test_wrong_fallback_is_an_error_when_the_task_is_sent(name: str | None, given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        region.fallback(given, name, URLS)
    assert region.fallback({'fallback': 'us', 'fallback_after': 5}, 'eu', URLS) == ('us', 5.0)


def test_route_is_taken_from_the_property_or_the_header() -> None:
    assert region.route(message(region='eu')) == ('eu', message({}))
    assert region.route(message({'x-region': 'eu', 'a': 1})) == ('eu', message({'a': 1}))
    assert region.route(message({'x-region': 'us'}, region='eu'))[0] == 'eu'
    assert region.route(message({'a': 1}, priority=3)) == (None, message({'a': 1}, priority=3))


@pytest.mark.parametrize(
    ('sent_in', 'task_id', 'homes', 'is_here'),
    [
        ('us', 'a', ['us'], False),
        ('asia', 'a', ['asia', 'us'], False),
        ('eu', 'a', ['us'], True),  # it was sent here, and came back by another region
        ('us', 'next', ['us'], True),
        ('eu', 'next', [], True),
        (['us'], 'a', ['us'], False),
        (None, 'next', [], True),
    ],
)
def test_where_a_result_returns(sent_in: Any, task_id: str, homes: list[str], is_here: bool) -> None:
    """The result of the task `a`, which region `us` gave to region `eu`, or of one that it sends."""
    giver = ['eu', 'eu_regions', 'us', 'a', 'p:eu:a:1']
    request = Context({'id': task_id, 'headers': {'x-giver': giver, 'x-from-region': sent_in}})
    result = {'_id': 'r', 'date': 5.0, 'status': 'SUCCESS'}
    found, here = RegionsRoom().on_result(None, request, task_id, result, is_result=True)
    assert [(database, region.region_of(doc['_id'])) for database, doc in found] == [('eu_regions', to) for to in homes]
    assert [doc['record'] for _, doc in found if 'record' in doc] == (['p:eu:a:1'] if task_id == 'a' else [])
    assert here is is_here
