"""Secrets: no log, output or process table contains a password or a session."""

from __future__ import annotations

import json
import re
import uuid
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from celery_couchdb.testing import Server
from kombu_couchdb.admin import dead
from kombu_couchdb.embedded import EmbeddedServer
from tests.conftest import PATIENCE, wait_for

from .conftest import Site, celery, couchdb


def forms(server: EmbeddedServer, *passwords: str) -> list[str]:
    """Return the forms of passwords: plain, quoted for URLs, and in base64, alone and with the user as in a header."""
    plain = [text for password in passwords for text in (password, f'{server.user}:{password}')]
    return [*plain, *map(quote, passwords), *(b64encode(text.encode()).decode().rstrip('=') for text in plain)]


def processes(what: str) -> dict[str, str]:
    """Return the contents of a /proc file of each process, by path."""
    found = {}
    for file in Path('/proc').glob(f'[0-9]*/{what}'):
        try:
            found[str(file)] = file.read_bytes().replace(b'\0', b' ').decode(errors='replace')
        except OSError:
            pass  # the process has ended, or belongs to another user
    return found


@pytest.fixture(scope='module')
def unique() -> Iterator[EmbeddedServer]:
    """A server with a password that occurs nowhere else."""
    with EmbeddedServer() as server:
        yield server


@pytest.mark.parametrize(('auth', 'pool', 'nodes'), [('cookie', 'prefork', 1), ('basic', 'threads', 2)])
def test_no_output_of_a_site_contains_a_secret(
    unique: EmbeddedServer, site: Site, auth: str, pool: str, nodes: int
) -> None:
    server, options, other = Server(unique.url), {'auth': auth}, f'other-{uuid.uuid4().hex}'

    def urls(database: str) -> str:
        # After the first node is stopped, the second one is tried, which does not run either.
        first = server.couchdb_url(database)
        return ';'.join([first, first.replace(f'{unique.password}@127.0.0.1', f'{other}@localhost')][:nodes])

    site.use(urls(site.database), urls(site.results))
    assert (other in site.environment['BROKER_URL']) == (nodes > 1)
    regions = {'region': 'here', 'regions': {'here': urls(f'{site.database}-regions')}}
    settings = {
        'broker_transport_options': {**options, **regions},
        'result_backend_transport_options': options,
        'broker_read_url': urls(site.database),
        'broker_write_url': urls(site.database),
    }
    site.app.conf.update(settings)
    try:
        worker = site.worker('-l', 'DEBUG', '-E', pool=pool, **settings)
        assert site.send('add', 1, 1).get(timeout=PATIENCE) == 2
        assert isinstance(site.send('fail', 'on purpose').get(timeout=PATIENCE, propagate=False), ValueError)
        refused, unknown = site.send('refused', str(site.journal), 'a'), site.send('unknown')
        inspect = site.app.control.inspect([worker.hostname()], timeout=PATIENCE, limit=1)
        told = [str(answer) for answer in (inspect.stats(), inspect.conf(with_defaults=True), inspect.report())]
        assert 'couchdb' in told[0]
        assert all('broker_read_url' in answer and site.results in answer for answer in told[1:])
        wait_for(lambda: dead.count(server.client(site.database)) == 3, 'the dead letters')
        for words in ('report', 'inspect conf', 'couchdb status --json'):
            done = celery(*words.split(), **site.environment, SETTINGS=json.dumps(settings))
            told += [done.stdout, done.stderr]
        told += [
            couchdb(site, *words.split()).output
            for words in (
                'vacuum --yes',
                f'failures show {refused.id} --json',
                f'show {unknown.id} --json',
                'failures retry --all --yes',
            )
        ]
        told += processes('cmdline').values()
        unique.stop(kill=True)  # the worker logs that the server is unavailable
        wait_for(lambda: 'trying again until it responds' in worker.logs(), 'the worker to notice the outage')
        told.append(worker.logs())
    finally:
        if unique.process is None:
            unique.start()
    session = re.compile('AuthSession=|Basic [A-Za-z0-9+/]{16}')
    assert [text for text in told if session.search(text)] == []
    assert [(secret, text) for secret in forms(unique, unique.password, other) for text in told if secret in text] == []


def test_password_of_the_embedded_server_is_not_in_the_process_table(unique: EmbeddedServer) -> None:
    for what in ('cmdline', 'environ'):
        text = processes(what)[f'/proc/{unique.pid}/{what}']
        assert text
        assert unique.password not in text
