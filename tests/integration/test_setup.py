"""Database setup: what it creates, changes and keeps, and its notices."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kombu import Connection

import celery_couchdb.design
from celery_couchdb.testing import Server
from kombu_couchdb import design
from kombu_couchdb.admin.setup import Step, Wanted, plan
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import AccessDenied
from kombu_couchdb.queues.databases import REVS_LIMIT
from tests.conftest import wait_for
from tests.support import ROOT, Inbox, publish


def wanted(client: Client, *members: str, **more: Any) -> Wanted:
    """Return the wanted state of a broker's database."""
    return Wanted(client, design.documents(), members, revisions=REVS_LIMIT, **more)


def set_up(what: Wanted) -> list[Step]:
    """Set up a database and return the steps."""
    steps = plan(what)
    for step in steps:
        if step.do:
            step.do()
    return steps


def to_do(what: Wanted) -> list[str]:
    """Return the pending steps."""
    return [step.goal for step in plan(what) if step.do]


def notices(steps: list[Step]) -> list[str]:
    """Return the notices for the administrator."""
    assert all(step.do is None for step in steps if step.notice)
    return [step.goal for step in steps if step.notice]


def security(client: Client) -> dict[str, Any]:
    """Return the security object of the database."""
    found: dict[str, Any] = client.request('GET', '/_security')
    return found


def test_setup_creates_everything_once(server: Server, database: str, apache_couchdb: bool) -> None:
    client = server.client(database)
    assert [step.goal for step in set_up(wanted(client)) if step.do] == [
        'the database exists',
        *(f'{doc["_id"]} is up to date' for doc in design.documents()),
        *(['at most 20 revisions of a document are remembered'] if apache_couchdb else []),
        'only administrators and members may read and write',
    ]
    assert to_do(wanted(client)) == []
    assert security(client)['members']['roles'] == ['_admin']
    if apache_couchdb:
        assert client.request('GET', '/_revs_limit') == REVS_LIMIT


def test_database_is_usable_after_setup(connect: Callable[..., Connection], server: Server, database: str) -> None:
    set_up(wanted(server.client(database)))
    connection = connect(create_database=False)
    publish(connection, 'hello')
    assert Inbox(connection).wait(1) == ['hello']


def test_broker_and_results_may_share_a_database(server: Server, database: str) -> None:
    documents = [*design.documents(), celery_couchdb.design.document()]
    set_up(Wanted(server.client(database), documents))
    assert {row['id'] for row in server.client(database).id_range('_design/')} == {doc['_id'] for doc in documents}


def test_edited_design_document_is_restored(client: Client) -> None:
    set_up(wanted(client))
    doc = client.get(f'_design/{design.NAME}')
    map_function = doc['views']['dead']['map']
    client.put({**doc, 'views': {**doc['views'], 'dead': {'map': 'function (doc) {}'}}})
    assert to_do(wanted(client)) == [f'_design/{design.NAME} is up to date', 'indexes without a view are removed']
    set_up(wanted(client))
    assert client.get(f'_design/{design.NAME}')['views']['dead']['map'] == map_function
    assert to_do(wanted(client)) == []


def test_two_concurrent_setups_succeed(client: Client) -> None:
    first, second = (plan(wanted(client)) for _ in range(2))
    for step in [*first, *second]:
        if step.do:
            step.do()
    assert to_do(wanted(client)) == []


def test_other_design_documents_are_kept(client: Client) -> None:
    """Those of newer and older versions may be in use by workers."""
    names = ['celery-v99', 'celery-v1', 'celery', 'celery-results', 'mine-v1']
    views = {'ready': {'map': 'function (doc) { emit(doc.queue, null) }'}}
    client.bulk([{'_id': f'_design/{name}', 'views': views} for name in names])
    set_up(wanted(client))
    assert all(client.get(f'_design/{name}')['views'] == views for name in names)


# -- rights


@pytest.mark.parametrize('admins', [None, {'names': ['boss'], 'roles': []}])
def test_public_database_is_restricted(client: Client, admins: dict[str, Any] | None) -> None:
    client.request('PUT', '/_security', body={'admins': admins} if admins else {})
    set_up(wanted(client, 'ann'))
    assert security(client)['members'] == {'names': ['ann'], 'roles': ['_admin']}
    assert security(client).get('admins') == admins or not admins


def test_existing_members_are_kept(client: Client) -> None:
    before = {
        'members': {'names': ['eve'], 'roles': ['staff']},
        'other': {'x': 1},
        'admins': {'names': ['boss'], 'roles': ['bosses']},
    }
    client.request('PUT', '/_security', body=before)
    set_up(wanted(client, 'ann', 'bob'))
    wanted_now = {**before, 'members': {'names': ['eve', 'ann', 'bob'], 'roles': ['staff']}}
    wait_for(lambda: security(client) == wanted_now, 'the new members')
    assert to_do(wanted(client, 'bob')) == []


def test_app_without_a_user_is_not_locked_out(client: Client) -> None:
    client.request('PUT', '/_security', body={})
    [notice] = notices(set_up(wanted(client, anonymous=True)))
    assert 'names no user' in notice
    assert 'members' not in security(client) or not security(client)['members'].get('roles')


def test_unknown_member_is_reported(
    server: Server, client: Client, users: Callable[[str, str], None], apache_couchdb: bool
) -> None:
    if not apache_couchdb:
        pytest.skip('the embedded server has only one user')
    known, unknown = f'known-{uuid.uuid4().hex}', f'unknown-{uuid.uuid4().hex}'
    users(known, 'password')
    assert notices(set_up(wanted(client, known, unknown, server.user))) == [
        f"there is no user '{unknown}' yet: create it in CouchDB, as a document in _users"
    ]
    assert security(client)['members']['names'] == [known, unknown, server.user]


def test_setup_without_rights_says_what_to_do(
    server: Server, client: Client, database: str, users: Callable[[str, str], None], apache_couchdb: bool
) -> None:
    if not apache_couchdb:
        pytest.skip('the embedded server has only one user')
    name = f'member-{uuid.uuid4().hex}'
    users(name, 'password')
    member = server.client(database, user=name, password='password')
    sentence = f"{database}: user '{name}' may not set up the database; name an administrator of CouchDB with --admin"
    with pytest.raises(AccessDenied, match=sentence):  # without the right to read
        plan(wanted(member))
    with pytest.raises(AccessDenied, match='may not set up the database'):
        plan(wanted(server.client(f'{database}-2', user=name, password='password')))
    client.request('PUT', '/_security', body={'members': {'names': [name]}, 'admins': {'roles': ['_admin']}})
    with pytest.raises(AccessDenied, match=sentence):  # with the right to read
        plan(wanted(member))
    set_up(wanted(client))
    assert to_do(wanted(member)) == []
    client.request('PUT', '/_security', body={'members': {'roles': ['_admin']}, 'admins': {'names': [name]}})
    client.put({**client.get(f'_design/{design.NAME}'), 'views': {}})
    # An administrator of an existing database suffices, but cannot check which users exist.
    assert notices(set_up(wanted(member, 'whoever'))) == []
    assert to_do(wanted(member, 'whoever')) == []


def test_database_of_broadcasts_has_the_users_of_the_broker(client: Client, broadcasts: Client) -> None:
    before = {'members': {'names': ['eve'], 'roles': ['staff']}, 'admins': {'names': ['boss'], 'roles': []}}
    client.request('PUT', '/_security', body=before)
    broker = wanted(client, 'ann')
    what = replace(broker, client=broadcasts, documents=[], users_of=client)
    assert 'the database exists' in to_do(what)
    set_up(broker)
    set_up(what)
    assert security(broadcasts) == security(client)
    assert to_do(what) == []
    set_up(wanted(client, 'bob'))
    assert to_do(what) == [f'those who may use {client.address.database} may read and write']


def test_sample_output_names_all_design_documents(server: Server) -> None:
    text = (ROOT / 'docs/start/couchdb.rst').read_text('utf-8')
    sample = text[text.index('couchdb setup --admin admin\n') :].partition('\n\n')[0]
    new = server.client(f'test-{uuid.uuid4().hex}')
    results = Wanted(new, [design.conflicted(), celery_couchdb.design.document()], ())
    goals = [step.goal for what in (wanted(new), results) for step in plan(what)]
    assert re.findall(r'  done     (_design/.*)', sample) == [goal for goal in goals if goal.startswith('_design/')]
