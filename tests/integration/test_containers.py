"""CouchDB as broker and result backend of pytest-celery, in a container; Docker is simulated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kombu import Connection
from pytest_celery.defaults import default_pytest_celery_network  # noqa: F401  a fixture of its plugin, which is off here

from celery_couchdb.testing import (
    CouchDBContainer,
    CouchDBTestBackend,
    CouchDBTestBroker,
    CouchDBWorkerContainer,
    Server,
)
from celery_couchdb.testing.containers import COUCHDB_ENV
from kombu_couchdb.errors import DatabaseMissing
from tests.support import Inbox, publish

#: CouchDB 3.5.0 logs this when it listens.
LISTENS = b'[info] 2026-11-21T21:22:39.857481Z nonode@nohost <0.330.0> -------- Apache CouchDB has started on http://any:5984/\n'


class Container:
    """A simulated Docker container of CouchDB. Its port is that of the server under test."""

    def __init__(self, port: int, given: dict[str, Any]) -> None:
        self.given, self.id, self.name, self.status = given, 'f00d' * 16, 'couchdb', 'running'
        self.log, self.removed = b'', False
        env = [f'{name}={value}' for name, value in given['environment'].items()]
        # The image exposes a second port, too. It is not published.
        ports = {'5984/tcp': [{'HostIp': '0.0.0.0', 'HostPort': str(port)}], '4369/tcp': None}
        networks = {given['network']: {'IPAddress': '172.18.0.2'}}
        self.attrs = {
            'Config': {'Hostname': self.id[:12], 'Env': env},
            'HostConfig': {'PortBindings': given['ports']},
            'NetworkSettings': {'Networks': networks, 'Ports': ports},
        }

    def reload(self) -> None:
        """Do nothing."""

    def logs(self) -> bytes:
        """Return one more line than in the last call."""
        self.log += b'[info] starting\n' if not self.log else LISTENS
        return self.log

    def exec_run(self, command: str) -> tuple[int, bytes]:
        """Return a list of sockets in which CouchDB's port is listening."""
        assert '/proc/net/tcp' in command
        return 0, b'   0: 00000000:1760 00000000:0000 0A 00000000:00000000 00:00000000 00000000  5984'

    def remove(self, force: bool) -> None:
        """Record the removal."""
        self.removed = True


class Engine:
    """A simulated Docker engine, with the methods that the fixtures use."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.started: list[Container] = []
        self.gone: list[str] = []
        self.containers = SimpleNamespace(run=self._run)
        self.networks = self.volumes = SimpleNamespace(create=self._create)

    def _run(self, **given: Any) -> Container:
        self.started.append(Container(self._port, given))
        return self.started[-1]

    def _create(self, *names: str, **given: Any) -> SimpleNamespace:
        name = given.get('name') or (names[0] if names else f'volume{len(self.started)}')
        return SimpleNamespace(name=name, id=name, remove=lambda *_, **__: self.gone.append(name))


@pytest.fixture
def docker_client(server: Server, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A client of the simulated Docker engine."""
    if server.host not in ('localhost', '127.0.0.1'):
        pytest.skip('the server must be reachable at 127.0.0.1, like a container')
    monkeypatch.setattr('pytest_docker_tools.wrappers.container.tests_inside_container', lambda: False)
    return Engine(server.port)


@pytest.fixture
def default_couchdb_broker_env(server: Server) -> dict[str, str]:
    """No settings, because the server under test has an administrator."""
    return {'COUCHDB_USER': server.user, 'COUCHDB_PASSWORD': server.password}


@pytest.fixture
def vhost(monkeypatch: pytest.MonkeyPatch, database: str) -> str:
    """The database of the container is the test's own, because the server is shared."""
    monkeypatch.setattr(CouchDBContainer, 'vhost', database)
    return database


def test_container_of_the_official_image(
    vhost: str,
    celery_couchdb_backend: CouchDBTestBackend,
    docker_client: Engine,
    default_couchdb_backend_volume: Any,
    server: Server,
) -> None:
    [container] = docker_client.started
    assert LISTENS in container.log
    given = container.given
    assert given['image'] == 'couchdb:3.5'
    assert given['environment'] == COUCHDB_ENV
    assert given['environment'].keys() == {'COUCHDB_USER', 'COUCHDB_PASSWORD'}
    assert given['ports'] == {'5984/tcp': None}
    assert given['volumes'] == {default_couchdb_backend_volume.name: {'bind': '/opt/couchdb/data', 'mode': 'rw'}}
    assert 'command' not in given
    urls = Server(f'http://celery:{COUCHDB_ENV["COUCHDB_PASSWORD"]}@127.0.0.1:{server.port}').couchdb_url(vhost)
    config = celery_couchdb_backend.config()
    assert (config['host_url'], config['port'], config['vhost']) == (urls, server.port, vhost)
    assert config['url'] == urls.replace(f'127.0.0.1:{server.port}', f'{container.id[:12]}:5984')
    container.status = 'exited'  # the database cannot be deleted with that password


def test_broker_in_a_container(vhost: str, celery_couchdb_broker: CouchDBTestBroker, server: Server) -> None:
    with Connection(celery_couchdb_broker.config()['host_url']) as connection:
        publish(connection, 'hello')
        assert Inbox(connection).wait(1) == ['hello']
    assert celery_couchdb_broker.container.client.address.database == vhost
    assert celery_couchdb_broker.container.version()
    other = celery_couchdb_broker.config(vhost='other', extra=1)
    assert (other['host_url'], other['extra']) == (server.couchdb_url('other'), 1)
    celery_couchdb_broker.teardown()
    with pytest.raises(DatabaseMissing):
        server.client(vhost).sequence()


def test_worker_image_contains_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv('PYTEST_CELERY_PKG', raising=False)
    assert CouchDBWorkerContainer.buildargs()['PYTEST_CELERY_PKG'] == 'celery-couchdb[testing]'
    monkeypatch.setenv('PYTEST_CELERY_PKG', './celery_couchdb.whl')
    assert CouchDBWorkerContainer.buildargs()['PYTEST_CELERY_PKG'] == './celery_couchdb.whl'


# -- URLs


@pytest.mark.parametrize(
    ('url', 'expected'),
    [
        ('http://joe:s%40p%2Fc@host:5985', 'couchdb://joe:s%40p%2Fc@host:5985/d'),
        ('http://joe:pw@host', 'couchdb://joe:pw@host:5984/d'),
        ('https://joe:pw@host', 'couchdbs://joe:pw@host:443/d'),
        ('https://joe:pw@[::1]:6984/', 'couchdbs://joe:pw@[::1]:6984/d'),
        ('http://host:5984', 'couchdb://host:5984/d'),
    ],
)
def test_urls_of_a_server(url: str, expected: str) -> None:
    server = Server(url)
    assert server.couchdb_url('d') == expected
    client = server.client('d')
    assert client.address.server == expected.replace('couchdb', 'http', 1).replace('joe:s%40p%2Fc@', '').replace(
        'joe:pw@', ''
    ).removesuffix('/d')
