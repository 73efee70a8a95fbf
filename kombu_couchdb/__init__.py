"""The kombu transport for Apache CouchDB. Importing this package makes `couchdb://` and `couchdbs://` known to kombu."""

from __future__ import annotations

import warnings

__all__ = ['__version__', 'hook']

__version__ = '0.1.0'

try:
    from .registration import register

    register()
except (
    Exception
) as exc:  # kombu loads this in every app of the environment: it must break none, whatever kombu has become
    warnings.warn(f'couchdb:// could not be made known to kombu: {exc!r}', stacklevel=2)

#: What the entry point in the group `kombu.serializers` names. kombu loads that group when it is imported, so that a
#: Celery app need not import us; the "serializer" registered has no codec (kombu has no entry point for transports).
hook = (None, None, 'application/x-celery-couchdb')
