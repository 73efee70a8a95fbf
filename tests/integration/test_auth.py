"""Sessions and credential rotation on a real server."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import requests
from celery import Celery
from kombu import Connection

from celery_couchdb.testing import Server
from kombu_couchdb.couchdb import server as servers
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.call import Call
from kombu_couchdb.couchdb.changes import open_feed
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.fork_safety import Shared
from kombu_couchdb.couchdb.http import Connections, LoginHeaders
from tests.conftest import PATIENCE, Users, wait_for
from tests.support import Inbox, publish


@pytest.fixture
def logins(monkeypatch: pytest.MonkeyPatch, database: str) -> list[str]:
    """The authentication header of each request, in order: `Authorization`, `Cookie`, or '' if there is none."""
    seen: list[str] = []
    exchange = Connections.exchange

    def noted(self: Connections, call: Call, headers: LoginHeaders) -> Any:
        if database in self.url or call.path == '/_session':
            fields: dict[str, str] = {}
            headers.add_to(fields)
            seen.append(next(iter(fields), ''))
        return exchange(self, call, headers)

    monkeypatch.setattr(Connections, 'exchange', noted)
    as_another_process(monkeypatch)
    return seen


def as_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delete the sessions and passwords that this process has cached, as in a new process."""
    monkeypatch.setattr(servers, '_servers', Shared({}))


def test_broker_and_results_share_one_session(
    server: Server, url: str, client: Client, database: str, logins: list[str]
) -> None:
    with Connection(url, transport_options={'auth': 'cookie'}) as connection:
        inbox = Inbox(connection)
        publish(connection, 'hello')
        assert inbox.wait(1) == ['hello']
        app = Celery('cookies', set_as_current=False, backend=url)
        app.conf.result_backend_transport_options = {'auth': 'cookie'}
        app.backend.store_result('a', 42, 'SUCCESS')
        assert app.AsyncResult('a').get(timeout=PATIENCE) == 42
        app.close()
    assert logins.count('') == 1
    assert set(logins) == {'', 'Cookie'}


def test_password_of_a_connection_may_be_a_function(server: Server, database: str, client: Client) -> None:
    with Connection(
        server.couchdb_url(database, user=''), userid=server.user, password=lambda: server.password
    ) as connection:
        publish(connection, 'hello')
        assert Inbox(connection).wait(1) == ['hello']


#: The return value of the function `credentials`.
current: list[str] = []


def credentials() -> list[str]:
    """Return the current user and password."""
    return current


@pytest.mark.parametrize('feed', [False, True])
def test_many_processes_switch_to_a_new_password_without_locking_the_user(
    server: Server,
    database: str,
    client: Client,
    member: dict[str, str],
    users: Users,
    monkeypatch: pytest.MonkeyPatch,
    feed: bool,
) -> None:
    def use(each: Client) -> None:
        if feed:
            open_feed(each, 0, {}, 10, 4.0).close()
        else:
            each.put({'_id': uuid.uuid4().hex})

    client.request('PUT', '/_security', body={'members': {'names': [member['user']]}})
    current[:] = member.values()
    address = Address.of(
        scheme='couchdb',
        host=server.host,
        port=server.port,
        database=database,
        default_database='',
        user=None,
        password=None,
        credentials=f'{__name__}:credentials',
    )
    clients = []
    for _ in range(8):
        as_another_process(monkeypatch)
        clients.append(Client(address))
        use(clients[-1])
    current[1] = f'changed-{uuid.uuid4().hex}'
    users(*current)
    old: dict[str, str] = {}
    clients[0].server.node.auth.headers(lambda data: pytest.fail('there is a session')).add_to(old)
    wait_for(
        lambda: requests.get(client.address.url, headers=old, timeout=PATIENCE).status_code == 401,
        'the sessions to expire',
    )
    for each in clients:
        use(each)
        each.close()
