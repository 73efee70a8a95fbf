"""Default settings of the containers. A project's fixtures can override them."""

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
#: CouchDB's port, and the port mapping: any free port of this machine.
COUCHDB_PORT = '5984/tcp'
COUCHDB_PORTS: dict[str, Any] = {COUCHDB_PORT: None}
#: The administrator. The password is random, because Docker opens the port to the network.
COUCHDB_ENV = {'COUCHDB_USER': 'celery', 'COUCHDB_PASSWORD': secrets.token_hex(16)}
#: The image's data folder, as a volume: the data survive a restart, and are deleted with the test.
COUCHDB_VOLUME = {'bind': '/opt/couchdb/data', 'mode': 'rw'}
#: The text that CouchDB logs when it accepts connections.
COUCHDB_READY = 'Apache CouchDB has started on http'
#: How long a container may take to start, in seconds.
COUCHDB_CONTAINER_TIMEOUT = 60
COUCHDB_DATABASE = 'celery'

#: The package that `pip` adds to the worker's image.
WORKER_PACKAGE = 'celery-couchdb[testing]'
