"""Parcels: tasks of publishers without rights on the broker's database, which a worker moves there."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import requests
from celery import Celery, chain, group
from kombu.exceptions import OperationalError

from kombu_couchdb.contrib.parcels.stored_parcels import Parcels
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import workitem
from kombu_couchdb.errors import AccessDenied, ConfigurationError
from tests.acceptance.conftest import Site
from tests.conftest import PATIENCE, PATIENT, PATIENT_BROKER, wait_for
from tests.parcels import database_of_parcels, receipt_of
from tests.support import end, items


@pytest.fixture
def start(site: Site, parcels: Client) -> Callable[..., Any]:
    """A function that starts a worker which moves parcels of some tasks."""

    def start() -> Any:
        options = {'parcels': parcels.address.database, 'parcels_accept': ('add', 'tot*', 'fragile', 'flaky')}
        return site.worker(broker_transport_options={**PATIENT_BROKER, **options})

    return start


@pytest.fixture
def publisher(site: Site, parcels: Client, stack: ExitStack) -> Celery:
    """An app that publishes to the database of parcels and reads results."""
    app = Celery(
        'publisher',
        set_as_current=False,
        broker=site.server.couchdb_url(parcels.address.database),
        backend=site.environment['RESULT_URL'],
    )
    app.conf.update(result_backend_transport_options=PATIENT)
    stack.callback(end, app)
    return app


def reasons(parcels: Client) -> list[str]:
    """Return the reasons of refused parcels."""
    return [doc['reason'] for doc in Parcels(parcels).listing('refused')]


def is_empty(parcels: Client) -> bool:
    return not list(Parcels(parcels).ids('waiting', 'refused'))


def test_publisher_needs_only_celery(start: Callable[..., Any], publisher: Celery, parcels: Client) -> None:
    early = publisher.send_task('add', (1, 2))  # before the worker starts
    start()
    add, large = publisher.signature('add'), 'x' * 40_000
    assert early.get(timeout=PATIENCE) == 3
    assert publisher.send_task('add', (large, 'y')).get(timeout=PATIENCE) == large + 'y'
    assert publisher.send_task('add', (large, 'y'), compression='gzip').get(timeout=PATIENCE) == large + 'y'
    assert publisher.send_task('add', (2, 2), countdown=1.0).get(timeout=PATIENCE) == 4
    assert chain(add.clone((1, 1)), add.clone((3,))).apply_async().get(timeout=PATIENCE) == 5
    assert group(add.clone((n, n)) for n in range(10)).apply_async().get(timeout=PATIENCE) == [2 * n for n in range(10)]
    ends = group(add.clone((n, n)) for n in range(3)) | publisher.signature('total')
    assert ends.apply_async().get(timeout=PATIENCE) == 6
    wait_for(lambda: is_empty(parcels), 'the deletion of all parcels')


def test_receipts_of_parcels_that_plain_http_stores(start: Callable[..., Any], site: Site, parcels: Client) -> None:
    start()
    answer = requests.post(
        parcels.address.url,
        json={'task': 'add', 'args': [2], 'kwargs': {'y': 3}, 'id': 'by hand'},
        timeout=PATIENCE,
        auth=(str(parcels.address.user), str(parcels.address.password)),
    )
    assert answer.status_code == 201, answer.text
    assert site.app.AsyncResult('by hand').get(timeout=PATIENCE) == 5
    receipt = wait_for(lambda: receipt_of(parcels, answer.json()['id']), 'the receipt')
    assert (receipt['state'], receipt['result'], receipt['args']) == ('SUCCESS', 5, [2])
    assert receipt['moved'] <= receipt['done'] < receipt['kept_until']
    later = time.time() + 3600
    parcels.bulk(
        [
            {'_id': 'error', 'task': 'fragile', 'args': [str(site.journal), 'bread'], 'result': 'forged', 'done': 1},
            {'_id': 'retried', 'task': 'flaky', 'args': [2, 0.01]},
            {'_id': 'large', 'task': 'add', 'args': ['x' * 40_000, 'y' * 40_000]},
            {'_id': 'planned', 'task': 'add', 'args': [1, 2], 'date': later},
        ]
    )
    error = wait_for(lambda: receipt_of(parcels, 'error'), 'the receipt')
    assert (error['state'], error['error']) == ('FAILURE', 'ValueError: bread may not pass')
    assert 'result' not in error
    retried = wait_for(lambda: receipt_of(parcels, 'retried'), 'the receipt')
    assert (retried['state'], retried['result'][0]) == ('SUCCESS', 2)
    large = wait_for(lambda: receipt_of(parcels, 'large'), 'the receipt')
    assert large['left_out'] == 'the result has 80,002 characters, more than 64,000'
    planned = parcels.get('planned')
    assert (planned['type'], planned['state'], 'done' in planned) == ('Receipt', 'PENDING', False)
    assert planned['kept_until'] > later
    site.app.control.revoke(planned['id'])


#: Refused parcels, and the beginnings of the reasons.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({'task': 'fail', 'args': ['a']}, "task 'fail' is not in parcels_accept"),
    ({'task': 'add', 'args': 5}, 'args must be a list and kwargs an object'),
    ({'task': 'add', 'date': 'tomorrow'}, 'date must be a number of seconds since 1970'),
    ({'task': 'add', 'published': 1.7e308, 'args': 5}, 'args must be a list and kwargs an object'),
    ({'task': 'add', 'date': 1e305}, 'date must be a number of seconds since 1970'),
    ({'task': 'add', 'queue': 'elsewhere'}, "queue 'elsewhere' is not in task_queues"),
    ({'task': 'add', 'priority': 11}, 'priority must be a whole number from 0 to 9'),
    ({'task': 'add', 'id': 'a\n[forged]'}, 'id must be printable text of at most 255 characters'),
    ({'tusk': 'add'}, 'it has neither a message nor the name of a task'),
]


def test_refused_parcels_have_a_reason_and_block_no_other(
    start: Callable[..., Any], site: Site, publisher: Celery, parcels: Client
) -> None:
    parcels.bulk([{'_id': f'bad-{number}', **document} for number, (document, _) in enumerate(REFUSED)])
    parcels.bulk([{'_id': 'good', 'task': 'add', 'args': [1, 2], 'id': 'good'}])
    worker = start()
    assert site.app.AsyncResult('good').get(timeout=PATIENCE) == 3
    wait_for(lambda: len(reasons(parcels)) == len(REFUSED), 'the refusals')
    for number, (_, reason) in enumerate(REFUSED):
        doc = parcels.get(f'bad-{number}')
        assert doc['status'] == 'refused'
        assert doc['reason'].startswith(reason)
        assert f'parcel bad-{number} is refused: ' in worker.logs()

    add, forbidden = publisher.signature('add', (1, 2)), publisher.signature('fail', ('a',))
    publisher.send_task('add', (1, 2), link=forbidden)
    publisher.send_task('add', (1, 2), link_error=publisher.signature('add') | forbidden)
    chain(add, forbidden).apply_async()
    (group([add] * 2) | forbidden).apply_async()  # two parcels
    publisher.send_task('add', (1, 2), link=publisher.signature('add', options={'queue': 'elsewhere'}))
    publisher.send_task('add', (1, 2), serializer='pickle')
    publisher.send_task('add', (1, 2), headers={'job_key': 'a'})
    publisher.send_task('add', (1, 2), queue='elsewhere')
    wait_for(lambda: len(reasons(parcels)) == len(REFUSED) + 9, 'all refusals')
    assert sum("task 'fail' is not in parcels_accept" in reason for reason in reasons(parcels)) == 5 + 1


def test_publisher_without_rights_on_the_broker(site: Site, member: dict[str, str], stack: ExitStack) -> None:
    site.set_up()
    own = stack.enter_context(database_of_parcels(site.server, member['user'])).address.database
    site.worker(broker_transport_options={**PATIENT_BROKER, 'parcels': own, 'parcels_accept': ('add',)})
    app = Celery('publisher', set_as_current=False, broker=site.server.couchdb_url(own, **member))
    stack.callback(app.pool.force_close_all)
    result = app.send_task('add', (1, 2))
    assert site.app.AsyncResult(result.id).get(timeout=PATIENCE) == 3
    with pytest.raises(AccessDenied):
        site.server.client(site.database, **member).id_range('')
    # A forged WorkItem, which a member of the broker's database could store, has no effect here.
    forged: Any = workitem.new('forged', 'celery', {'body': '', 'headers': {}, 'properties': {}}, 1.0)
    site.server.client(own, **member).bulk([forged])
    assert site.app.AsyncResult(app.send_task('add', (3, 4)).id).get(timeout=PATIENCE) == 7
    wait_for(lambda: not items(site.client), 'the acks')


def test_other_uses_of_a_database_of_parcels_are_refused(publisher: Celery, parcels: Client) -> None:
    with publisher.connection_for_read() as connection:
        uses: list[Callable[[], Any]] = [
            lambda: connection.SimpleQueue('celery').get(block=False),
            lambda: connection.default_channel.queue_delete('celery'),
            lambda: connection.default_channel.queue_purge('celery'),
        ]
        for use in uses:
            with pytest.raises(ConfigurationError, match='is a database of parcels: '):
                use()
    with pytest.raises(
        (ConfigurationError, OperationalError), match='it takes tasks, and neither events nor remote control'
    ):
        publisher.control.shutdown()
    assert is_empty(parcels)
