"""The URL scheme `couchdb://`: how it becomes known to kombu and Celery, and which database a URL selects."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest
from kombu import Connection

from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.client import Client
from tests.support import Inbox, items, publish, run_python

#: A user name and a password with all printable ASCII characters and more. HTTP allows no colon in a user name.
USER = 'jürgen @/?#[]%+&=;,$!*\'()"<>\\^`{|}~'
PASSWORD = 'p:@/?#[]% +&=;,$!*\'()"<>\\^`{|}~ß€😀'


def test_celery_app_needs_no_import(url: str, client: Client) -> None:
    run_python(
        """
import os
from celery import Celery
app = Celery('app', broker=os.environ['URL'])
app.send_task('add', (1, 2))
""",
        URL=url,
    )
    assert [(item['queue'], item['message']['headers']['task']) for item in items(client)] == [('celery', 'add')]


def test_kombu_needs_one_import(url: str, client: Client) -> None:
    run_python(
        """
import os
import kombu_couchdb
from kombu import Connection
with Connection(os.environ['URL']) as connection:
    connection.Producer().publish('hello', routing_key='q')
""",
        URL=url,
    )
    assert [item['queue'] for item in items(client)] == ['q']


def test_hook_imports_few_modules() -> None:
    done = run_python("""
import sys
import kombu.serialization
loaded = ('requests', 'kombu_couchdb', 'celery_couchdb')
print(*sorted(name for name in sys.modules if name.partition('.')[0] in loaded))
""")
    assert done.stdout.split() == [
        'celery_couchdb',
        'celery_couchdb.patches',
        'kombu_couchdb',
        'kombu_couchdb.registration',
    ]


def test_failing_hook_does_not_break_kombu() -> None:
    done = run_python("""
import kombu.transport
kombu.transport.TRANSPORT_ALIASES = None
import kombu.serialization
print(kombu.serialization.dumps([1], 'json')[2])
""")
    assert done.stdout.strip() == '[1]'


def test_default_database() -> None:
    assert Connection('couchdb://127.0.0.1').transport.address.database == 'celery'


def test_database_from_the_path(server: Server) -> None:
    name = f'test-{uuid.uuid4().hex[:12]}+plus/slash$(dollar)_-'
    with Connection(server.couchdb_url(name)) as connection:
        publish(connection, 'hello')
    client = server.client(name)
    try:
        assert [item['queue'] for item in items(client)] == ['q']
    finally:
        client.delete()


def test_failover_urls_of_a_connection(url: str, client: Client) -> None:
    dead = 'couchdb://127.0.0.1:1/nowhere'
    with Connection(f'{dead};{url}') as connection:
        connection.ensure_connection(max_retries=3, interval_start=0)
        publish(connection, 'hello')
    assert len(items(client)) == 1


def test_user_and_password_of_any_characters(
    server: Server, client: Client, database: str, users: Callable[..., None], apache_couchdb: bool
) -> None:
    if not apache_couchdb:
        pytest.skip('the embedded server has only one user')
    with Connection(server.couchdb_url(database)) as connection:
        connection.connect()  # an administrator sets up the database
    name = USER + uuid.uuid4().hex[:8]
    users(name, PASSWORD)
    client.request('PUT', '/_security', body={'members': {'names': [name], 'roles': []}})
    with Connection(server.couchdb_url(database, name, PASSWORD)) as connection:
        inbox = Inbox(connection)
        publish(connection, 'hello')
        inbox.wait(1)


def test_document_ids_that_look_like_paths(client: Client) -> None:
    """Without quoting, deleting the document `.` would delete the database."""
    for doc_id in ('.', '..', '_local/..', '_design/..'):
        rev = client.put({'_id': doc_id, 'n': 1})
        assert client.get(doc_id)['n'] == 1
        client.put({'_id': doc_id, '_rev': rev, '_deleted': True})
        assert client.get_or_none(doc_id) is None
        assert client.info()
