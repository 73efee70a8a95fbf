"""Whatever a site does, neither the password nor a session is in anything that people read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_couchdb.testing import Server
from kombu_couchdb.admin import dead
from kombu_couchdb.embedded import EmbeddedServer
from tests.conftest import PATIENCE, wait_for
from tests.support import ROOT

from .conftest import Site


def said(*arguments: str, **environment: str) -> str:
    """Return what a command of `celery` prints."""
    done = subprocess.run([sys.executable, '-m', 'celery', '-A', 'tests.acceptance.app', *arguments], cwd=ROOT, text=True,
                          env={**os.environ, **environment}, capture_output=True, timeout=PATIENCE, check=False)
    return done.stdout + done.stderr


def processes(what: str) -> dict[str, str]:
    """Return a file of each process, by its path."""
    found = {}
    for file in Path('/proc').glob(f'[0-9]*/{what}'):
        try:
            found[str(file)] = file.read_bytes().replace(b'\0', b' ').decode(errors='replace')
        except OSError:
            pass  # it ended, or is somebody else's
    return found


@pytest.fixture(scope='module')
def unique() -> Iterator[EmbeddedServer]:
    """A server whose password is no word that is anywhere else."""
    with EmbeddedServer() as server:
        yield server


@pytest.mark.parametrize(('auth', 'pool'), [('basic', 'threads'), ('cookie', 'prefork')])
def test_site_at_work(unique: EmbeddedServer, site: Site, auth: str, pool: str) -> None:
    server, options = Server(unique.url), {'auth': auth}
    site.use(server.couchdb_url(site.database), server.couchdb_url(site.results))
    settings = {'broker_transport_options': options, 'result_backend_transport_options': options}
    site.app.conf.update(settings)
    try:
        worker = site.worker('-l', 'DEBUG', '-E', pool=pool, **settings)
        assert site.send('add', 1, 1).get(timeout=PATIENCE) == 2
        assert isinstance(site.send('fail', 'on purpose').get(timeout=PATIENCE, propagate=False), ValueError)
        refused, unknown = site.send('refused', str(site.journal), 'a'), site.send('unknown')
        inspect = site.app.control.inspect([worker.hostname()], timeout=PATIENCE, limit=1)
        told = [str(answer) for answer in (inspect.stats(), inspect.conf(with_defaults=True), inspect.report())]
        assert 'couchdb' in told[0]
        wait_for(lambda: dead.count(server.client(site.database)) == 2, 'the dead letters')
        told += [said(*words.split(), **site.environment, SETTINGS='{}') for words in (
            'report', 'couchdb status --json', 'couchdb vacuum --yes', f'couchdb dead show {refused.id} {unknown.id} --json',
            'couchdb dead replay --all --yes')]
        told += processes('cmdline').values()
        unique.stop(kill=True)  # what a worker says of a server that is gone
        wait_for(lambda: 'trying again until it answers' in worker.logs(), 'the worker to miss its server')
        told.append(worker.logs())
    finally:
        if unique.process is None:
            unique.start()
    session = re.compile('AuthSession=|Basic [A-Za-z0-9+/]{16}')
    assert [text for text in told if unique.password in text or session.search(text)] == []


def test_embedded_server_is_told_its_password_where_nobody_sees_it(unique: EmbeddedServer) -> None:
    for what in ('cmdline', 'environ'):
        text = processes(what)[f'/proc/{unique.pid}/{what}']
        assert text
        assert unique.password not in text
