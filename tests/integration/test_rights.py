"""What a member of a database may not do, and in which words CouchDB says so; `test_least_privilege` is what he may do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery
from kombu import Connection

from kombu_couchdb import design
from kombu_couchdb.admin.setup import Wanted, plan
from kombu_couchdb.client import Client
from kombu_couchdb.errors import AccessDenied, CouchDBError
from tests.conftest import Server
from tests.support import items, publish


def set_up(client: Client, *members: str) -> None:
    """Make a broker's database ready for these members."""
    for step in plan(Wanted(client, design.documents(), members), {}):
        if step.do:
            step.do()


@pytest.fixture
def own(server: Server, database: str, client: Client, member: dict[str, str]) -> Client:
    """The test's database, which is set up, as a member of it."""
    set_up(client, member['user'])
    return server.client(database, **member)


@pytest.mark.parametrize(('act', 'words'), [
    (lambda own: own.put({'_id': '_design/mine', 'views': {}}), 'You are not a db or server admin'),
    (lambda own: own.delete(), 'You are not a server admin'),
    (lambda own: own.request('POST', '/_purge', body={'x': ['1-a']}), 'You are not a server admin'),
    (lambda own: own.request('POST', '/_compact', body={}), 'You are not a server or db admin'),
    (lambda own: Client(own.address.root).request('GET', '/_all_dbs'), 'You are not a server admin'),
    (lambda own: Client(own.address.root).request('GET', '/_node/_local/_config'), 'You are not a server admin'),
    (lambda own: Client(own.address.root).request('GET', '/_users/_all_docs'), 'You are not a server admin'),
], ids=['design', 'delete', 'purge', 'compact', 'databases', 'configuration', 'users'])
def test_what_is_an_administrator_s(own: Client, member: dict[str, str], act: Callable[[Client], Any], words: str) -> None:
    with pytest.raises(AccessDenied, match=f"refused user '{member['user']}'") as caught:
        act(own)
    assert words in str(caught.value)


def test_rights_and_design_documents_stay_as_they_are(own: Client, client: Client) -> None:
    before = client.request('GET', '/_security'), client.get(f'_design/{design.NAME}')
    with pytest.raises(CouchDBError):
        own.request('PUT', '/_security', body={})
    [answer] = own.bulk([{**before[1], 'views': {}}])
    assert answer['error'] == 'forbidden'
    assert (client.request('GET', '/_security'), client.get(f'_design/{design.NAME}')) == before


def test_another_database_is_closed(server: Server, own: Client, client: Client, database: str) -> None:
    other = server.client(f'{database}-other')
    other.create()
    try:
        with pytest.raises(AccessDenied, match=r'You are not allowed to access this db; let an administrator run .*setup'):
            Client(replace(own.address, database=other.address.database)).id_range('')
    finally:
        other.delete()


def test_who_publishes_need_not_see_results(server: Server, own: Client, client: Client, app: Celery,
                                            member: dict[str, str]) -> None:
    app.backend.store_result('a', 'private', 'SUCCESS')
    results = app.backend.client.address
    publisher = Celery('publisher', set_as_current=False, broker=server.couchdb_url(own.address.database, **member),
                       backend=server.couchdb_url(results.database, **member))
    sent = publisher.send_task('add', (1, 2))
    assert [item['message']['headers']['id'] for item in items(client)] == [sent.id]
    with pytest.raises(AccessDenied, match=results.database):
        publisher.AsyncResult('a').get(timeout=1)
    publisher.close()


def test_nobody_is_let_in(server: Server, own: Client, database: str) -> None:
    with pytest.raises(AccessDenied, match='refused nobody'):
        server.client(database, user=None, password=None).id_range('')


def test_members_read_and_write_all_of_a_database(own: Client, connect: Callable[..., Connection]) -> None:
    publish(connect(), 'the arguments')
    [item] = items(own)
    assert 'the arguments' in str(item['message'])
    [answer] = own.bulk([{**item, '_deleted': True}])
    assert answer['ok']


#: Who has not the role `worker` may add documents, and change and delete none: so it seems.
ADD_ONLY = '''function (newDoc, oldDoc, userCtx) {
    var may = userCtx.roles.indexOf('worker') >= 0 || userCtx.roles.indexOf('_admin') >= 0;
    if (!may && oldDoc && !oldDoc._deleted) {
        throw({forbidden: 'only workers change what is there'});
    }
}'''


def test_a_validating_function_does_not_keep_members_from_changing_what_is_there(own: Client, client: Client,
                                                                                 connect: Callable[..., Connection]) -> None:
    client.put({'_id': '_design/publishers', 'validate_doc_update': ADD_ONLY})
    publish(connect(), 'the arguments')
    [item] = items(own)
    [answer] = own.bulk([{**item, 'queue': 'mine'}])
    assert answer == {'id': item['_id'], 'error': 'forbidden', 'reason': 'only workers change what is there'}
    forged = {**item, 'queue': 'mine', '_rev': f'9-{"a" * 32}'}
    own.request('POST', '/_bulk_docs', body={'new_edits': False, 'docs': [forged]})
    assert [item['queue'] for item in items(own)] == ['mine']
