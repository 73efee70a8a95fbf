"""Actions that CouchDB refuses to members of a database, and its messages.

For allowed ones see `test_least_privilege`.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any

import pytest
import requests
from celery import Celery
from kombu import Connection

from celery_couchdb.testing import Server
from kombu_couchdb import design
from kombu_couchdb.admin.setup import Wanted, plan
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import AccessDenied, CouchDBError
from tests.conftest import PATIENCE
from tests.support import items, publish


def set_up(client: Client, *members: str) -> None:
    """Set up a broker's database for these members."""
    for step in plan(Wanted(client, design.documents(), members)):
        if step.do:
            step.do()


@pytest.fixture
def own(server: Server, database: str, client: Client, member: dict[str, str]) -> Client:
    """A client for the test's database, which is set up, as a member."""
    set_up(client, member['user'])
    return server.client(database, **member)


@pytest.mark.parametrize(
    ('act', 'words'),
    [
        (lambda own: own.put({'_id': '_design/mine', 'views': {}}), 'You are not a db or server admin'),
        (lambda own: own.delete(), 'You are not a server admin'),
        (lambda own: own.request('POST', '/_purge', body={'x': ['1-a']}), 'You are not a server admin'),
        (lambda own: own.request('POST', '/_compact', body={}), 'You are not a server or db admin'),
        (lambda own: own.request('GET', '/_all_dbs', is_of_server=True), 'You are not a server admin'),
        (lambda own: own.request('GET', '/_node/_local/_config', is_of_server=True), 'You are not a server admin'),
        (lambda own: own.request('GET', '/_users/_all_docs', is_of_server=True), 'You are not a server admin'),
    ],
    ids=['design', 'delete', 'purge', 'compact', 'databases', 'configuration', 'users'],
)
def test_member_cannot_do_what_needs_an_administrator(
    own: Client, member: dict[str, str], act: Callable[[Client], Any], words: str
) -> None:
    with pytest.raises(AccessDenied, match=f"refused user '{member['user']}'") as caught:
        act(own)
    assert words in str(caught.value)


def test_member_cannot_change_security_or_design_documents(own: Client, client: Client) -> None:
    before = client.request('GET', '/_security'), client.get(f'_design/{design.NAME}')
    with pytest.raises(CouchDBError):
        own.request('PUT', '/_security', body={})
    [answer] = own.bulk([{**before[1], 'views': {}}])
    assert answer.error == 'forbidden'
    assert (client.request('GET', '/_security'), client.get(f'_design/{design.NAME}')) == before


def test_member_cannot_read_another_database(server: Server, own: Client, client: Client, database: str) -> None:
    other = server.client(f'{database}-other')
    other.create()
    try:
        with pytest.raises(
            AccessDenied, match=r'You are not allowed to access this db; let an administrator run .*setup'
        ):
            Client(replace(own.address, database=other.address.database)).id_range('')
    finally:
        other.delete()


def test_publisher_needs_no_access_to_results(
    server: Server, own: Client, client: Client, app: Celery, member: dict[str, str]
) -> None:
    app.backend.store_result('a', 'private', 'SUCCESS')
    results = app.backend.client.address
    publisher = Celery(
        'publisher',
        set_as_current=False,
        broker=server.couchdb_url(own.address.database, **member),
        backend=server.couchdb_url(results.database, **member),
    )
    sent = publisher.send_task('add', (1, 2))
    assert [item['message']['headers']['id'] for item in items(client)] == [sent.id]
    with pytest.raises(AccessDenied, match=results.database):
        publisher.AsyncResult('a').get(timeout=1)
    publisher.close()


def test_anonymous_access_is_refused(server: Server, own: Client, database: str) -> None:
    with pytest.raises(AccessDenied, match='refused nobody'):
        server.client(database, user=None, password=None).id_range('')


def test_member_can_read_and_write_all_documents(own: Client, connect: Callable[..., Connection]) -> None:
    publish(connect(), 'the arguments')
    [item] = items(own)
    assert 'the arguments' in str(item['message'])
    [answer] = own.bulk([{**item, '_deleted': True}])
    assert answer.is_stored


# -- replication: CouchDB sends requests on behalf of any user


@pytest.fixture
def replicate(server: Server, member: dict[str, str]) -> Callable[..., tuple[int, str]]:
    """A function that requests a replication as a user without any rights, and returns status and text."""

    def replicate(source: str, path: str = '/_replicate', *, user: bool = True) -> tuple[int, str]:
        # By default CouchDB retries five times, for ten seconds.
        body = json.dumps({'source': source, 'target': 'nowhere', 'retries_per_request': 1})
        login = b64encode(f'{member["user"]}:{member["password"]}'.encode()).decode()
        headers = {'Content-Type': 'application/json', **({'Authorization': f'Basic {login}'} if user else {})}
        with closing(HTTPConnection(server.host, server.port, timeout=PATIENCE)) as link:
            link.request('POST', path, body, headers)
            answer = link.getresponse()
            return answer.status, answer.read().decode()

    return replicate


Replicate = Callable[..., tuple[int, str]]


@pytest.fixture
def nowhere(server: Server) -> str:
    """The URL of a database that does not exist. CouchDB says so, if it has sent a request to it."""
    return f'http://{server.host}:{server.port}/nowhere'


def test_replication_without_an_account_is_refused(
    replicate: Replicate, nowhere: str, server: Server, member: dict[str, str]
) -> None:
    assert replicate(nowhere, user=False)[0] == 401
    with pytest.raises(AccessDenied, match='not allowed to access this db'):
        server.client('any', **member).request(
            'PUT', '/_replicator/x', body={'source': nowhere, 'target': 'nowhere'}, is_of_server=True
        )


@pytest.mark.parametrize('path', ['/_replicate', '/_replicate/', '//_replicate', '/%5Freplicate', '/_replicate?x'])
def test_paths_that_a_proxy_must_block(replicate: Replicate, nowhere: str, path: str) -> None:
    assert f'could not open {nowhere}' in replicate(nowhere, path)[1]


def test_administrator_can_forbid_replication(
    replicate: Replicate, nowhere: str, server: Server, database: str
) -> None:
    setting = '/_node/_local/_config/replicator/valid_endpoint_protocols'
    root = server.client('any')
    before = requests.get(server.url + setting, timeout=PATIENCE)
    root.request('PUT', setting, body='none', is_of_server=True)
    try:
        for source in (nowhere, nowhere.replace('http', 'https'), database):
            status, text = replicate(source)
            assert (status, 'endpoint has an invalid url' in text) == (400, True)
    finally:
        if before.ok:
            root.request('PUT', setting, body=before.json(), is_of_server=True)
        else:
            requests.delete(server.url + setting, timeout=PATIENCE)
