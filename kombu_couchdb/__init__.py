"""The kombu transport for Apache CouchDB. Importing it makes `couchdb://` and `couchdbs://` known to kombu."""

from __future__ import annotations

import warnings

__all__ = ['__version__', 'hook']

__version__ = '0.1.0'

try:
    from .registration import register

    register()
except Exception as exc:
    # kombu imports this package in every application of the environment. An incompatible kombu must not break those
    # that do not use CouchDB.
    warnings.warn(f'couchdb:// could not be made known to kombu: {exc!r}', stacklevel=2)

#: The target of the entry point in the group `kombu.serializers`. kombu has no entry point for transports, but it loads
#: this group when it is imported, so that a Celery app need not import this package. The "serializer" has no codec.
hook = (None, None, 'application/x-celery-couchdb')
