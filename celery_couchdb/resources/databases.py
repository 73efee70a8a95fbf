"""The resource of databases: documents, tombstones and sizes."""

from __future__ import annotations

from kombu_couchdb.admin.status import DatabaseStatus, Status

from .columns import Column, count_cell, format_size

#: The columns of databases.
DATABASES = [
    Column('DATABASE', 'name', min_width=10),
    Column('DOCUMENTS', 'documents', count_cell, right=True),
    Column('TOMBSTONES', 'tombstones', count_cell, right=True),
    Column('SIZE', 'size', format_size, right=True),
    Column('ACTIVE', 'active', format_size, right=True),
]

#: Said of a status without a database of broadcasts.
NO_BROADCASTS = 'No database of broadcasts, or none that you may read: run "couchdb setup".'


def databases(found: Status) -> list[DatabaseStatus]:
    """Return the databases of a status, each once: results may be in the database of the broker."""
    results = found['results']
    shown = [found['database'], found['broadcasts'], results]
    if results and results['name'] == found['database']['name']:
        shown.pop()
    return [database for database in shown if database]


def server_title(found: Status) -> str:
    """Return what the server is, and where."""
    server = found['server']
    return f'{"PouchDB (embedded)" if server["embedded"] else "CouchDB"} {server["version"]} at {server["url"]}'
