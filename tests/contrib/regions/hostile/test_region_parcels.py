"""What a broken region, or one that was broken into, may write: its links, and those of others, go on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from celery_couchdb.testing import Server
from kombu_couchdb.contrib.regions import region
from tests.hostile.parcels import GOOD, HOSTILE, MESSAGE, store
from tests.parcels import store_nested
from tests.regions import Region, Regions, regions_on
from tests.support import items

TASK_ID = MESSAGE['headers']['id']

_WRONG: list[Any] = [None, 5, 'x', '', [], {}, [[]], {'a': {}}, ['celery-task-meta-x'], -1e300, True]
_NAMES = ('_id', 'type', 'status', 'delivery', 'value', 'base64', 'content_type', 'parcel', 'error', 'task')

#: Members of a result that returns.
_RESULTS: list[dict[str, Any]] = [
    *(
        {'_id': doc_id}
        for doc_id in ('_design/celery-task-meta-x', '_local/celery-task-meta-x', 'celery-taskset-meta-x')
    ),
    *({'type': kind} for kind in ('Group', 'Value', 'WorkItem')),
    *({'status': 'x' * 100_000}, {'delivery': [1e300]}, {'delivery': ['x']}),
    *({name: value} for name in _NAMES for value in _WRONG),
    {'_deleted': True},
    {'_attachments': {'body': {'stub': True, 'length': 5}}},
    {'_unknown': 1, '_rev': 'x', '_revisions': {}},
    {'expires': 0, 'date': 'never'},
]

#: Members of the document that brings a result.
_BRINGING: list[dict[str, Any]] = [
    *({name: value} for name in ('result', 'date', 'record', 'type', 'together') for value in _WRONG),
    *({'record': record} for record in ('_design/x', 'region:us', 'p:eu', 'p:asia:kept:1', 'p:eu:x:1')),
]


@pytest.fixture
def regions(server: Server) -> Iterator[Regions]:
    with regions_on(server, 'eu', 'us', 'asia', lend_after=0.001) as regions:
        yield regions


def record_id(to: str, tag: str) -> str:
    return region.record_id(to, TASK_ID, tag)


def rest(regions: Regions) -> None:
    """Work, and check that nothing is written when nothing is new."""

    def sequences() -> list[Any]:
        clients = [client for one in regions.all for client in (one.broker, one.results, one.regions)]
        # Each leader writes the document of its region when its term begins.
        return [[row for row in client.id_range('') if row['id'][:7] != 'region:'] for client in clients]

    for _ in range(3):  # a result may come back from the region to which a record was given next
        regions.work()
    before = sequences()
    regions.work()
    assert sequences() == before


def test_hostile_records_are_refused_and_the_others_arrive(regions: Regions) -> None:
    us, eu = regions['us'], regions['eu']
    names = {record_id('eu', f'{n:03}'): name for n, name in enumerate(HOSTILE)}
    store(us.regions, [{**GOOD, **HOSTILE[name][0], '_id': doc_id} for doc_id, name in names.items()])
    wrong = [region.record_id('eu', 'another', 'a'), 'p:eu:', 'p:eu:x', 'p:eu:::', 'p:eu:\0:\n']
    store(us.regions, [{**GOOD, '_id': doc_id} for doc_id in wrong])
    store(us.regions, [{**GOOD, '_id': record_id('eu', f'9{n}')} for n in range(3)])
    regions.work('eu', 'us')
    assert len(items(eu.broker)) == 3
    for doc, name in zip(us.regions.fetch(list(names)), names.values(), strict=True):
        assert doc is not None, name
        assert HOSTILE[name][1] in str(doc.get('reason', doc.get('delayed'))), name
    rest(regions)


def test_foreign_ids_are_left_alone(regions: Regions) -> None:
    us = regions['us']
    foreign = ['p:us:eu:1', 'p:eu', 'p:', 'p:eus:us:1', 'q:eu:us:1', 'region:eu', 'p:EU:us:1', 'p;eu;us;1', 'r:eus:a:1']
    store(us.regions, [{**GOOD, '_id': doc_id} for doc_id in foreign])
    before = us.regions.fetch(foreign)
    rest(regions)
    assert us.regions.fetch(foreign) == before
    assert items(regions['eu'].broker) == []


def test_sender_cannot_set_what_belongs_to_the_transport(regions: Regions) -> None:
    info = {'exchange': 'celery.pidbox', 'claimed': {'by': 'broker:consumer:x'}}
    forged = {'delivery_tag': 'broker:consumer:x', 'delivery_info': info, 'priority': 99}
    giver = ['us', 'us', 'us', 'us', 'us']
    message = {**MESSAGE, 'properties': {**MESSAGE['properties'], **forged}}
    message['headers'] = {**MESSAGE['headers'], 'x-giver': giver, 'x-from-region': ['x']}
    store(regions['us'].regions, [{**GOOD, '_id': record_id('eu', '1'), 'message': message}])
    regions.work('eu', 'us')
    [item] = items(regions['eu'].broker)
    assert item['_id'].startswith('parcel:')
    assert item['message']['properties']['delivery_info'] == {'exchange': '', 'routing_key': 'celery'}
    assert item['message']['headers']['x-giver'][0] == 'eu'
    assert item['priority'] == 9


@pytest.mark.parametrize('names', [('message', 'exchange', 'routing_key', 'published'), ('task', 'id', 'type', 'date')])
def test_malformed_records_stop_nobody_at_home(regions: Regions, names: Sequence[str]) -> None:
    """Another region can change the records of tasks for it in the databases of their homes."""
    us = regions['us']
    states: list[dict[str, Any]] = [
        {'fallback': 'us', 'fallback_at': 1},
        {'fallback': 'asia', 'fallback_at': 1},
        {'fallback': ['us'], 'fallback_at': ['x']},
        {'lent': 1},
        {'lent': 1, 'cancelled': 'x'},
        {'cancelled': 1, 'terminate': 'x'},
        {'status': 'refused'},
        {'status': ['x'], 'reason': {}, 'fallback': 'us'},
        {'state': 'withdrawn'},
        {'state': 'withdrawn', 'run_in': ['us']},
        {'state': 'withdrawn', 'run_in': 'us'},
        {'state': ['there'], 'taken': 'x', 'delayed': 5},
    ]
    docs = [{**GOOD, **members} for members in states]
    spoilt = [doc for kept in docs for name in names for doc in (without(kept, name), {**kept, name: ['x']})]
    store(us.regions, [{**doc, '_id': record_id('eu', f'{n:03}')} for n, doc in enumerate(spoilt)])
    store(us.regions, [{**GOOD, '_id': record_id('eu', 'last'), 'fallback': 'us', 'fallback_at': 2}])
    regions.work('us', 'eu')
    assert us.regions.get_or_none(record_id('eu', 'last')) is None
    regions.work('eu', 'us')
    rest(regions)


def without(doc: dict[str, Any], name: str) -> dict[str, Any]:
    return {member: value for member, value in doc.items() if member != name}


def bring(eu: Region, us: Region, task_id: str, number: int, members: dict[str, Any]) -> dict[str, Any]:
    """Return a document of region `eu` that brings the result 3 to region `us`, with these members of the result."""
    meta = {'status': 'SUCCESS', 'result': 3, 'traceback': None, 'children': [], 'date_done': None}
    result = {**us.app.backend.result_document(task_id, 'add', meta), **members}
    return region.returned('us', task_id, f'{number:04}', {}, None, 1.0) | {'result': result}


def test_malformed_results_are_left_out_and_the_others_return(regions: Regions) -> None:
    us, eu = regions['us'], regions['eu']
    kept = {**GOOD, '_id': 'p:asia:kept:1'}
    store(us.regions, [kept])
    docs = [bring(eu, us, f'x{n}', n, members) for n, members in enumerate(_RESULTS)]
    more = [bring(eu, us, f'y{n}', 1000 + n, {}) | members for n, members in enumerate(_BRINGING)]
    store(eu.regions, [*docs, *more, bring(eu, us, 'good', 9999, {})])
    regions.work('us', 'eu')
    assert eu.returning() == []
    assert us.app.AsyncResult('good').get(timeout=1) == 3
    assert us.regions.get_or_none(kept['_id'])
    assert us.results.id_range('_design/celery-task') == []
    rest(regions)


def test_unreadable_documents_stop_nobody(regions: Regions, apache_couchdb: bool) -> None:
    if not apache_couchdb:
        pytest.skip('the embedded server refuses such documents')
    us, eu = regions['us'], regions['eu']
    due = '"fallback":"us","fallback_at":1'
    for number in range(5):
        store_nested(us.regions, record_id('eu', f'a{number}'), 1_500, due)
        store_nested(us.regions, record_id('eu', f'b{number}'), 1_500)
        store_nested(us.regions, f'r:eu:x:{number}', 1_500)
    store_nested(us.regions, 'region:us', 1_500)
    store(us.regions, [{**GOOD, '_id': record_id('eu', 'c'), 'fallback': 'us', 'fallback_at': 2}])
    store(us.regions, [{**GOOD, '_id': record_id('eu', 'd')}])
    store(eu.regions, [bring(eu, us, 'good', 9999, {})])
    regions.work('us', 'eu')  # it takes its own task back before the other region takes it
    regions.work('eu', 'us')
    assert len(items(us.broker)) == len(items(eu.broker)) == 1
    assert us.app.AsyncResult('good').get(timeout=1) == 3
    rest(regions)


def test_hostile_wants_are_ignored(regions: Regions) -> None:
    us, eu = regions['us'], regions['eu']
    eu.app.send_task('add', (1, 2), region='any')
    hostile: list[Any] = [
        *(None, [], 'celery', {'celery': '5'}, {'celery': -1}, {'celery': [1]}, {'celery': 1e300}),
        *({'q' * 100_000: 1, '': 1, '\0': 1}, {str(number): 1 for number in range(10_000)}),
    ]

    def write(want: Any) -> None:
        old = us.regions.get_or_none('region:us') or {}
        doc = {**GOOD, '_id': 'region:us', 'type': 'Region', 'date': 'never', 'want': want, 'until': time.time() + 60}
        store(us.regions, [{**doc, **({'_rev': old['_rev']} if old else {})}])

    for want in hostile:
        write(want)
        regions.work('eu', 'us')
        assert len(items(eu.broker)) == 1
    write({'celery': 10**15})
    regions.work('eu', 'us')
    assert items(eu.broker) == []
