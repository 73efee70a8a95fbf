"""What is done for a CouchDB user needs the rights of this user, also if the user of the app has more."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from celery import Celery, states

from celery_couchdb import audit
from celery_couchdb.contrib.beat import Schedules
from celery_couchdb.failures import Failures
from celery_couchdb.jobs import Jobs
from celery_couchdb.testing import Server
from kombu_couchdb import design
from kombu_couchdb.admin.setup import Wanted, plan
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import AccessDenied
from tests.support import items

from .conftest import Connect

#: Returns the clients for broker and results of a user who is a member of the given databases alone.
Acting = Callable[..., tuple[Client, Client]]

ETA = {'countdown': 3600, 'queue': 'mail'}


@pytest.fixture
def acting(server: Server, app: Celery, client: Client, broadcasts: Client, member: dict[str, str]) -> Iterator[Acting]:
    app.backend.store.database.set_up()
    results = app.backend.client
    own = server.client(client.address.database, **member), server.client(results.address.database, **member)

    def acting(*allowed: str) -> tuple[Client, Client]:
        for name, database in {'broker': client, 'broadcasts': broadcasts, 'results': results}.items():
            docs = design.documents() if name == 'broker' else []
            members = [member['user']] if name in allowed else ['nobody-else']
            for step in plan(Wanted(database, docs, members)):
                if step.do:
                    step.do()
        return own

    yield acting
    for found in own:
        found.close()


@pytest.fixture
def add(app: Celery) -> None:
    @app.task(name='add', shared=False)
    def add(x: int, y: int) -> int:
        return x + y


def dead_letter(app: Celery, client: Client, connect: Connect, task_id: str) -> None:
    """Leave a dead letter whose task has a result."""
    app.send_task('add', task_id=task_id, queue='mail')
    with connect() as connection:
        message = connection.SimpleQueue('mail').get(timeout=10)
        message.reject()
    app.backend.store_result(task_id, ValueError('no'), states.FAILURE)


def test_user_without_results_changes_no_result(app: Celery, client: Client, acting: Acting, connect: Connect) -> None:
    app.send_task('add', task_id='waiting', **ETA)
    dead_letter(app, client, connect, 'dead')
    broker, results = acting('broker', 'broadcasts')
    jobs, failures = Jobs(app, broker, results), Failures(app, broker, results)
    assert (jobs.state('waiting'), jobs.result_states(['dead'])) == ('scheduled', {})
    with pytest.raises(AccessDenied, match='the job waiting is removed, but its result cannot become REVOKED'):
        jobs.remove('waiting')
    with pytest.raises(AccessDenied):
        failures.retry(failures.find(['dead']))
    assert app.AsyncResult('dead').state == states.FAILURE
    assert Jobs(app).state('dead') == 'dead'


def test_user_without_broker_sends_nothing(app: Celery, client: Client, acting: Acting, add: None) -> None:
    Schedules(app).add('daily', 'add', schedule=3600.0, args=[1, 2])
    broker, results = acting('results')
    with pytest.raises(AccessDenied):
        [*Failures(app, broker, results).listing()]
    with pytest.raises(AccessDenied):
        Jobs(app, broker, results).remove('failed')
    with pytest.raises(AccessDenied):
        Schedules(app, broker).run('daily')
    assert not [doc for doc in items(client) if doc.get('type') == 'WorkItem']


def test_user_with_all_rights_acts(
    app: Celery, client: Client, acting: Acting, connect: Connect, add: None, broadcasts: Client
) -> None:
    app.send_task('add', task_id='waiting', **ETA)
    dead_letter(app, client, connect, 'dead')
    broker, results = acting('broker', 'results', 'broadcasts')
    jobs, failures = Jobs(app, broker, results), Failures(app, broker, results)
    assert jobs.remove('waiting').removed
    assert app.AsyncResult('waiting').state == states.REVOKED
    retried, refused = failures.retry([*failures.listing()])
    assert ({failure.id for failure in retried}, refused) == ({'dead'}, {})
    assert jobs.state('dead') == 'ready'
    jobs.remove('not known')  # declares what the second command needs
    before = broadcasts.info()['doc_count']
    jobs.remove('unknown')
    assert broadcasts.info()['doc_count'] == before + 1


def test_pages_of_a_user_without_results(app: Celery, client: Client, acting: Acting, member: dict[str, str]) -> None:
    pytest.importorskip('starlette')
    from celery_couchdb.web import create_app
    from tests.web import Browser, served

    app.send_task('add', task_id='waiting', **ETA)
    acting('broker', 'broadcasts')
    with served(create_app(app)) as url:
        browser = Browser(url)
        browser.log_in(**member)
        for path in ('/', '/queues', '/jobs', '/failures', '/workers', '/schedules', '/system', '/activity'):
            assert browser.get(path).status_code == 200, path
        browser.get('/tasks/waiting')
        assert 'Results are not shown: you may not read them.' in browser.text
        browser.post('/jobs', action='remove', select='waiting', confirmed='1')
        assert 'is removed, but its result cannot become REVOKED' in browser.text
        assert [action['action'] for action in audit.newest(client, 9)] == ['remove job']
