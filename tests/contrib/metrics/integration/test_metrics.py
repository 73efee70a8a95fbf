"""The command `celery couchdb metrics` on a server: the numbers, the requests, and what happens without a server."""

from __future__ import annotations

import pytest
from celery import Celery
from kombu import Connection

from celery_couchdb.testing import Server
from tests.integration.conftest import Run
from tests.support import Request, command_of, eta, publish, publish_many, record_requests

pytest.importorskip('prometheus_client')


def test_metrics_are_printed_once(run: Run, connection: Connection, server: Server, apache_couchdb: bool) -> None:
    publish_many(connection, range(3), 'q')
    publish(connection, 'later', 'q', headers=eta(3600))
    publish(connection, 'other', 'o\x1b[2J"')
    done = run('metrics')
    assert (done.exit_code, done.stderr) == (0, '')
    lines = done.stdout.splitlines()
    assert 'celery_couchdb_up 1.0' in lines
    assert 'celery_couchdb_queue_messages{queue="q",state="ready"} 3.0' in lines
    assert 'celery_couchdb_queue_messages{queue="q",state="scheduled"} 1.0' in lines
    assert r'celery_couchdb_queue_messages{queue="o\\x1b[2J\"",state="ready"} 1.0' in lines
    assert any(line.startswith('celery_couchdb_database_size_bytes{') for line in lines) is apache_couchdb
    assert all(line.isprintable() for line in lines)
    assert server.password not in done.output
    only = run('metrics', '--queue', 'q').stdout
    assert 'queue="q"' in only
    assert 'queue="o' not in only


def test_number_of_requests_of_a_reading(
    run: Run, app: Celery, connection: Connection, sent: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        publish(connection, 'hello', f'q{number}')
        publish(connection, 'later', f'q{number}', headers=eta(3600))
    results = record_requests(monkeypatch, app.backend.store.client.address.database)
    sent.clear()
    assert run('metrics').exit_code == 0
    assert len(sent) <= 11
    assert len(results) == 1


def test_unavailable_server_is_one_sentence() -> None:
    url = 'couchdb://joe:secret-word@127.0.0.1:1/celery'
    done = command_of(Celery('away', set_as_current=False, broker=url))('metrics')
    assert (done.exit_code, done.stdout) == (1, '')
    [line] = done.stderr.splitlines()
    assert 'refused' in line
    assert 'secret-word' not in line
