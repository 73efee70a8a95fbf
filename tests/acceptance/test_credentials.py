"""Credentials from a source: they may change while processes run, and wrong passwords are not tried repeatedly.

After some wrong passwords CouchDB locks the user for the client's address. Workers wait until the lock ends.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests

from kombu_couchdb.couchdb import auth
from tests.conftest import PATIENCE, Users, wait_for

from .conftest import Site


class Refusing(ThreadingHTTPServer):
    """A server that refuses every password, and records the passwords."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(('127.0.0.1', 0), Refusal)
        self.told: list[str] = []


class Refusal(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    server: Refusing

    def answer(self) -> None:
        text = self.rfile.read(int(self.headers.get('Content-Length', 0)))
        self.server.told.append(self.headers['Authorization'] or text.decode())
        body = json.dumps({'error': 'unauthorized', 'reason': 'Name or password is incorrect.'}).encode()
        self.send_response(401)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST = answer

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[Refusing]:
    with Refusing() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file from which this process and its workers read their password."""
    file = tmp_path / 'password'
    monkeypatch.setenv('COUCHDB_PASSWORD_FILE', str(file))
    return file


def options(site: Site, **more: Any) -> dict[str, Any]:
    """Return the settings of a worker that reads its password from the file, and use them in this process, too."""
    given = {'credentials': 'environment', **more}
    site.app.conf.update(broker_transport_options=given, result_backend_transport_options=given)
    return {'broker_transport_options': {**given, 'visibility_timeout': 6.0}, 'result_backend_transport_options': given}


@pytest.mark.parametrize('auth', ['basic', 'cookie'])
def test_new_password_is_used_without_a_restart(
    site: Site, member: dict[str, str], users: Users, secret: Path, monkeypatch: pytest.MonkeyPatch, auth: str
) -> None:
    changed = f'changed-{uuid.uuid4().hex}'
    monkeypatch.setenv('COUCHDB_USER', member['user'])
    secret.write_text(member['password'])
    site.set_up(member['user'])
    site.use_as('')
    worker = site.worker(pool='prefork', **options(site, auth=auth))
    assert site.send('add', 1, 2).get(timeout=PATIENCE) == 3
    planned = site.send('add', 3, 4, countdown=5)
    users(member['user'], changed)
    wait_for(lambda: f'refused user {member["user"]!r}' in worker.logs(), 'the worker to be refused')
    secret.write_text(changed)
    assert planned.get(timeout=PATIENCE) == 7
    assert [result.get(timeout=PATIENCE) for result in [site.send('add', n, 1) for n in range(5)]] == [1, 2, 3, 4, 5]
    assert not any(word in worker.logs() for word in (member['password'], changed))


def test_worker_and_publisher_with_a_wrong_password_try_once(site: Site, refusing: Refusing) -> None:
    url = f'couchdb://joe:wrong-word@127.0.0.1:{refusing.server_port}/db'
    site.use(url, url)
    worker = site.start()
    assert worker.container.wait(PATIENCE) != 0
    assert "refused user 'joe': Name or password is incorrect; check the user, password and rights" in worker.logs()
    assert 'wrong-word' not in worker.logs()
    assert len(refusing.told) == 1
    for _ in range(10):
        with pytest.raises(Exception, match="refused user 'joe'"):
            site.send('add', 1, 2)
    assert len(refusing.told) == 2


def test_worker_with_a_wrong_password_from_a_source_waits_for_another(
    site: Site, refusing: Refusing, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('COUCHDB_USER', 'joe')
    secret.write_text('wrong-word')
    url = f'couchdb://127.0.0.1:{refusing.server_port}/db'
    site.use(url, url)
    worker = site.start(**options(site))
    wait_for(lambda: worker.logs().count('Trying again in') >= 3, 'three attempts to connect')
    assert len(refusing.told) == 1
    secret.write_text('another')
    wait_for(lambda: len(refusing.told) == 2, 'the attempt with the other password')
    assert 'wrong-word' not in worker.logs()


def lock(site: Site, member: dict[str, str]) -> None:
    """Send wrong passwords for the user until CouchDB locks it, like another client at the same address."""
    url = site.server.couchdb_url(site.database, user='').replace('couchdb://', 'http://')
    wait_for(
        lambda: 'temporarily locked' in requests.get(url, auth=(member['user'], 'mistyped'), timeout=PATIENCE).text,
        'the user to be locked',
    )
    assert requests.get(url, auth=(member['user'], member['password']), timeout=PATIENCE).status_code == 403


def test_worker_continues_after_its_user_was_locked(
    site: Site, member: dict[str, str], users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, '_LOCKED_SECONDS', 0.0)  # this process publishes as soon as the lock ends
    site.set_up(member['user'])
    site.use_as(**member)
    worker = site.worker(pool='prefork', result_backend_always_retry=True)
    running = site.send('nap', str(site.journal), 'a', None)
    wait_for(lambda: site.journalled() == ['start a'], 'the task to start')
    lock(site, member)
    wait_for(
        lambda: f'has locked user {member["user"]!r} for up to five minutes' in worker.logs(),
        'the worker to be refused',
    )
    site.go_on()
    wait_for(lambda: 'results are not stored' in worker.logs(), 'the task to end')
    users(member['user'], member['password'])  # writing the user document again ends the lock
    results = site.server.client(site.results)
    wait_for(
        lambda: (results.get_or_none(f'celery-task-meta-{running.id}') or {}).get('status') == 'SUCCESS', 'the result'
    )
    assert running.get(timeout=PATIENCE) == 'a'
    assert site.send('add', 1, 2).get(timeout=PATIENCE) == 3
    assert worker.logs().count('; trying again until it responds') == 1
    assert member['password'] not in worker.logs()


def test_worker_starts_after_its_user_was_locked(site: Site, member: dict[str, str], users: Users) -> None:
    site.set_up(member['user'])
    site.use_as(**member)
    lock(site, member)
    cookie = {'auth': 'cookie'}
    worker = site.start(broker_transport_options=cookie, result_backend_transport_options=cookie)
    wait_for(lambda: worker.logs().count('Trying again in') >= 3, 'three attempts to connect')
    assert f'has locked user {member["user"]!r} for up to five minutes' in worker.logs()
    users(member['user'], member['password'])
    worker.ready()
    assert site.send('add', 1, 2).get(timeout=PATIENCE) == 3
