"""The command `celery couchdb check`."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator

import pytest
from celery import Celery
from click.testing import Result
from kombu import Connection, Queue

from celery_couchdb import design as results_design
from kombu_couchdb import design
from kombu_couchdb.admin import queues
from kombu_couchdb.couchdb.client import Client
from tests.conftest import PATIENCE
from tests.support import Request, command_of, eta, publish, publish_many, record_requests

from .conftest import Run

HOST = socket.gethostname()


@pytest.fixture
def results(app: Celery) -> Client:
    """A client for the database of results, which is set up."""
    app.backend.store.database.set_up()
    return app.backend.store.client


@pytest.fixture
def check(run: Run, results: Client, broadcasts: Client) -> Run:
    """A function that runs the command with a generous time limit; all databases are set up."""
    broadcasts.create()
    return lambda *given: run('check', '--timeout', str(PATIENCE), *given)


def passed(done: Result) -> str:
    assert (done.exit_code, done.stderr) == (0, ''), done.output
    [line] = done.stdout.splitlines()
    return line


def failed(done: Result) -> str:
    assert (done.exit_code, done.stdout) == (1, ''), done.output
    [line] = done.stderr.splitlines()
    return line


def heartbeat(client: Client, name: str, host: str, pid: int, *queues: str, expires_in: float = 60.0) -> None:
    """Write the heartbeat document of a consumer, 7 seconds ago."""
    now, doc_id = client.clock.now(), f'broker:consumer:{host}:{pid}:{name}'
    doc = {'_id': doc_id, 'type': 'Consumer', 'layout': design.NAME, 'host': host, 'pid': pid, 'queues': sorted(queues)}
    client.put({**doc, 'beats': 1, 'date': now - 7, 'expires': now + expires_in, 'rates': {}})


def test_databases_that_are_set_up_pass_with_one_request_each(
    check: Run, client: Client, results: Client, sent: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    to_results = record_requests(monkeypatch, results.address.database)
    sent.clear()
    assert passed(check()) == f'{client.address.url} is set up; {results.address.url} is set up'
    assert (len(sent), len(to_results)) == (1, 1)


def test_missing_design_document_fails(check: Run, client: Client, results: Client) -> None:
    names = {results_design.NAME: results, **dict.fromkeys((design.NAME, design.JOBS, design.CONFLICTED), client)}
    for name, found in names.items():
        doc = found.get(f'_design/{name}')
        found.bulk([{**doc, '_deleted': True}])
        assert failed(check()) == f'Error: {found.address.url} is not set up; run "celery -A your_app couchdb setup"'
        found.put({member: value for member, value in doc.items() if member != '_rev'})


def test_missing_database_of_broadcasts_is_told_and_no_failure(check: Run, broadcasts: Client) -> None:
    broadcasts.delete()
    assert f'every consumer follows the database of the broker, because {broadcasts.address.url}' in passed(check())


# -- workers


def mailbox(name: str) -> str:
    return f'{name}.celery.pidbox'


def test_fresh_heartbeat_of_a_worker_passes(check: Run, client: Client, sent: list[Request]) -> None:
    heartbeat(client, 'a', HOST, 5, 'celery', mailbox(f'shop@{HOST}'))
    heartbeat(client, 'b', HOST, 6, 'celery', mailbox(f'other@{HOST}'), expires_in=-60)
    heartbeat(client, 'c', 'elsewhere', 5, 'celery', expires_in=-60)
    sent.clear()
    said = passed(check('--worker', 'shop@%h'))
    assert re.search(rf'; worker shop@{re.escape(HOST)} wrote a heartbeat \d+ s ago$', said)
    assert len(sent) == 2
    assert f'worker other@{HOST} is overdue: its last heartbeat is ' in failed(check('-w', 'other@%h'))
    assert f'worker gone@{HOST} has no consumer: it is not running' in failed(check('-w', 'gone@%h'))
    heartbeat(client, 'd', HOST, 7, mailbox('shop@blue'))  # a host of its own choice
    assert 'worker shop@blue wrote' in passed(check('--worker', 'shop@blue'))


def test_every_consumer_of_the_process_must_be_alive(check: Run, client: Client) -> None:
    """With gevent, a second consumer in the process has the queue for remote control."""
    heartbeat(client, 'a', HOST, 5, 'celery', expires_in=-60)
    heartbeat(client, 'b', HOST, 5, mailbox(f'celery@{HOST}'))
    assert 'is overdue' in failed(check('-w', 'celery@%h'))


@pytest.mark.parametrize('pid', [1, 2])
def test_consumers_that_a_killed_worker_left_do_not_count(check: Run, client: Client, pid: int) -> None:
    """In a container, the worker that replaced it has the same process id."""
    heartbeat(client, 'old', HOST, 1, 'celery', expires_in=-60)
    heartbeat(client, 'older', HOST, 1, mailbox(f'celery@{HOST}'), expires_in=-60)
    assert 'is overdue' in failed(check('-w', 'celery@%h'))
    heartbeat(client, 'new', HOST, pid, mailbox(f'celery@{HOST}'))
    heartbeat(client, 'newer', HOST, pid, 'celery')
    assert re.search(r'wrote a heartbeat \d+ s ago$', passed(check('-w', 'celery@%h')))


def test_without_remote_control_the_machine_counts(check: Run, client: Client, app: Celery) -> None:
    app.conf.worker_enable_remote_control = False
    heartbeat(client, 'a', 'elsewhere', 5, 'celery')
    assert 'has no consumer' in failed(check('--worker', 'shop@%h'))
    heartbeat(client, 'b', HOST, 5, 'celery')
    assert 'wrote a heartbeat' in passed(check('--worker', 'shop@%h'))


def test_malformed_heartbeats_are_no_worker(check: Run, client: Client) -> None:
    client.put({'_id': f'broker:consumer:{HOST}:1:a', 'type': 'Consumer', 'queues': 5, 'expires': 'never'})
    client.put({'_id': f'broker:consumer:{HOST}:1:b', 'note': 'foreign'})
    assert 'has no consumer' in failed(check('--worker', 'shop@%h'))


# -- queues


def test_long_and_late_queues_fail(check: Run, connection: Connection, sent: list[Request]) -> None:
    publish_many(connection, range(5), 'long')
    publish(connection, 'late', 'late', headers=eta(-1000))
    publish_many(connection, range(9), 'later', headers=eta(3600))
    Queue('celeryev.1', channel=connection.default_channel, auto_delete=True, expires=600).declare()
    publish_many(connection, range(7), 'celeryev.1')  # of events: they do not count
    assert '; 6 ready messages' in passed(check('--max-ready', '5', '--max-oldest', '2000'))
    said = failed(check('--max-ready', '4', '--max-oldest', '500'))
    assert said.startswith('Error: queue late has a message that has been due for 1,00')
    assert said.endswith('; queue long has 5 ready messages, more than 4')
    sent.clear()
    said = failed(check('--max-ready', '0', '--max-oldest', '9999', '-Q', 'long', '-Q', 'tippo'))
    assert said.startswith('Error: queue long has 5 ready messages, more than 0; queue tippo does not exist; ')
    assert len(sent) == 1 + 1 + 4  # the second asks whether the index is complete
    assert 'take at most six.' in ' '.join(check('--help').stdout.split())


def test_only_named_queues_count(check: Run, connection: Connection) -> None:
    publish_many(connection, range(5), 'long')
    publish(connection, 'one', 'short')
    limits = ('--max-ready', '4', '--max-oldest', '500')
    assert '; 1 ready message' in passed(check('-Q', 'short', *limits))
    assert 'queue long has 5' in failed(check('-Q', 'short', '-Q', 'long', *limits))


def test_queue_that_does_not_exist_fails(check: Run, connection: Connection, sent: list[Request]) -> None:
    publish(connection, 'one', 'q')
    Queue('empty', channel=connection.default_channel).declare()
    sent.clear()
    assert failed(check('-Q', 'q', '-Q', 'empty', '-Q', 'tippo\x1b', '--max-ready', '5')) == (
        r'Error: queue tippo\x1b does not exist; start its first worker, or correct --queue'
    )
    assert len(sent) <= 5


# -- servers that do not respond


@pytest.fixture
def silent_server() -> Iterator[int]:
    """The port of a server that accepts connections and says nothing."""
    with socket.create_server(('127.0.0.1', 0)) as listening:
        yield listening.getsockname()[1]


def test_silent_server_fails_at_the_time_limit(silent_server: int) -> None:
    begun = time.monotonic()
    port = silent_server
    node = f'couchdb://joe:secret-word@127.0.0.1:{port}/celery'
    away = Celery('away', set_as_current=False, broker=f'{node};{node.replace("127.0.0.1", "localhost")}')
    said = failed(command_of(away)('check', '--timeout', '0.5'))
    assert 'within' in said
    assert 'secret-word' not in said
    assert time.monotonic() - begun < PATIENCE


def test_wrong_usage_exits_with_status_2(run: Run) -> None:
    for given in ('--max-ready -1', '--max-oldest nan', '--timeout 0', '--worker', 'now', '--queue q'):
        assert run('check', *given.split()).exit_code == 2, given


def test_paused_queue_may_be_long_and_old(check: Run, connection: Connection, client: Client) -> None:
    publish_many(connection, range(3), 'q')
    assert 'queue q has 3 ready messages' in failed(check('--max-ready', '2'))
    queues.pause(client, 'q')
    assert 'queue q is paused' in passed(check('--max-ready', '2', '--max-oldest', '0'))
