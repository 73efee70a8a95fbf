"""A real worker receives wrong headers of each kind: from a member, a publisher, a device and another region."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context

from celery_couchdb.testing import Server
from kombu_couchdb.contrib.parcels import parcel
from kombu_couchdb.contrib.regions import region
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import task_message, workitem
from tests.acceptance.conftest import site
from tests.conftest import PATIENCE, PATIENT_BROKER, wait_for
from tests.contrib.regions.acceptance.test_regions import start
from tests.parcels import database_of_parcels
from tests.regions import Regions, regions_on

from .parcels import GOOD, store

__all__ = ['site', 'start']

EMBEDDED: dict[str, Any] = dict.fromkeys(('callbacks', 'errbacks', 'chain', 'chord'))

#: A message as Celery writes it. If its task is `flaky`, it runs again at once.
FULL: dict[str, Any] = {
    'body': json.dumps([[1, 0], {}, EMBEDDED]),
    'content-type': 'application/json',
    'content-encoding': 'utf-8',
    'headers': Celery(set_as_current=False).amqp.as_task_v2('a', 'add', (1, 0)).headers,
    'properties': {'body_encoding': 'utf-8', 'priority': 0, 'correlation_id': 'a', 'delivery_info': {'exchange': ''}},
}

#: Its headers, and others that a worker, this transport or the parcels know.
NAMES = sorted({*FULL['headers'], *task_message.HEADERS, *dir(Context), 'x-parcel', 'rate_key', 'job_key'})

#: The members of a device's parcel.
_CALL = ('task', 'args', 'kwargs', 'id', 'queue', 'date', 'expires', 'priority', 'message', 'type', 'published')

#: Values of which most are wrong for each header.
_VALUES: list[Any] = ['x', '9999-12-31T23:59:59', -5, [[1]], ['x', 'y'], {'x': 'y'}]


@pytest.fixture
def parcels(server: Server) -> Iterator[Client]:
    with database_of_parcels(server) as client:
        yield client


@pytest.fixture
def regions(server: Server, parcels: Client) -> Iterator[Regions]:
    options = {**PATIENT_BROKER, 'parcels': parcels.address.database, 'parcels_accept': ['add', 'flaky']}
    with regions_on(server, 'eu', 'us', **options) as regions:
        yield regions


def messages(journal: Path, whom: str) -> list[dict[str, Any]]:
    """Return messages with a wrong header or member each, or with stamps that a retry could take for options."""
    unlisted = {'task': 'nap', 'args': [str(journal), whom, 0], 'kwargs': {}, 'options': {}, 'immutable': True}
    headers: dict[str, Any] = FULL['headers']
    values = [*(_VALUES[::2] if whom == 'region' else _VALUES), [unlisted]]
    changed: list[dict[str, Any]] = [{name: value} for name in NAMES if not name.startswith('__') for value in values]
    stamps: list[dict[str, Any]] = [
        {name: [unlisted], 'stamped_headers': []} for name in ('link', 'chain', 'task_id', 'stamped_headers')
    ]
    changed += [{'task': 'flaky', 'stamped_headers': list(found), 'stamps': found} for found in stamps]
    embedded: list[dict[str, Any]] = [{**EMBEDDED, name: value} for name in EMBEDDED for value in values]
    bodies = [*values, *([[1, 0], {}, members] for members in embedded)]
    return [
        *({**FULL, 'headers': {**headers, 'id': f'{whom}-{n}', **header}} for n, header in enumerate(changed)),
        *({**FULL, name: value} for name in ('content-type', 'content-encoding') for value in values),
        *({**FULL, 'body': json.dumps(body)} for body in bodies),
    ]


def record_id(message: dict[str, Any], number: int) -> str:
    """Return the id of a record of a task for the region `eu`."""
    return region.record_id('eu', str(message['headers']['id']), f'{number:06}')


def is_waiting(doc: dict[str, Any]) -> bool:
    """Tell whether a parcel or a message waits or runs now."""
    if doc.get('type') == 'WorkItem':
        return not doc.get('status') and workitem.is_due(doc, time.time())
    if doc['_id'].startswith('p:eu:'):
        return region.state_of(doc) == 'sent' and 'delayed' not in doc
    return parcel.is_waiting(doc) and not doc['_id'].startswith(('_design/', 'region:', 'r:'))


def test_worker_survives_wrong_headers_from_everybody(
    regions: Regions, parcels: Client, start: Callable[..., Any], tmp_path: Path
) -> None:
    eu, us, journal = regions['eu'], regions['us'], tmp_path / 'journal'
    common = {**GOOD, 'routing_key': 'celery'}
    for number, message in enumerate(messages(journal, 'publisher')):
        store(parcels, [{**common, '_id': f'p:{number:06}', 'message': message}])
    for number, message in enumerate(messages(journal, 'region')):
        store(us.regions, [{**common, '_id': record_id(message, number), 'message': message}])
    item = workitem.new('', 'celery', FULL, 1.0)
    for number, message in enumerate(messages(journal, 'member')):
        store(eu.broker, [{**item, '_id': f'{number:06}', 'message': message}])
    calls = [{'task': 'add', 'args': [1, 0], name: value} for name in _CALL for value in _VALUES]
    store(parcels, [{**call, '_id': f'device-{n}'} for n, call in enumerate(calls)])
    worker = start(eu, '-l', 'INFO')

    def waiting() -> list[dict[str, Any]]:
        docs = [row['doc'] for client in (parcels, us.regions, eu.broker) for row in client.id_range('', docs=True)]
        return list(filter(is_waiting, docs))

    wait_for(lambda: not waiting(), 'all messages to end')
    assert eu.app.send_task('add', (1, 2)).get(timeout=PATIENCE) == 3
    assert worker.container.terminate(PATIENCE) == 0
    assert 'Unrecoverable' not in worker.logs()
    ran = journal.read_text()  # what the callbacks have written: regions and members may choose any task
    assert 'end region' in ran
    assert 'end member' in ran
    assert 'publisher' not in ran
