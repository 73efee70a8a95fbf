"""Default settings of the containers; a project's fixtures may override them."""

from __future__ import annotations

import secrets
from typing import Any

__all__ = [
    'COUCHDB_CONTAINER_TIMEOUT',
    'COUCHDB_DATABASE',
    'COUCHDB_ENV',
    'COUCHDB_IMAGE',
    'COUCHDB_PORT',
    'COUCHDB_PORTS',
    'COUCHDB_READY',
    'COUCHDB_VOLUME',
    'WORKER_PACKAGE',
]

COUCHDB_IMAGE = 'couchdb:3.5'
#: CouchDB's port, and where it is bound to: any free port of this machine.
COUCHDB_PORT = '5984/tcp'
COUCHDB_PORTS: dict[str, Any] = {COUCHDB_PORT: None}
#: The administrator. Docker opens the port to the network, too: the password is another one each time.
COUCHDB_ENV = {'COUCHDB_USER': 'celery', 'COUCHDB_PASSWORD': secrets.token_hex(16)}
#: Where the image keeps its data, so that they outlive a restart and go with the test.
COUCHDB_VOLUME = {'bind': '/opt/couchdb/data', 'mode': 'rw'}
#: What CouchDB logs when it listens.
COUCHDB_READY = 'Apache CouchDB has started on http'
#: How long a container may take to start, in seconds.
COUCHDB_CONTAINER_TIMEOUT = 60
COUCHDB_DATABASE = 'celery'

#: What `pip` adds to the worker's image.
WORKER_PACKAGE = 'celery-couchdb[testing]'
