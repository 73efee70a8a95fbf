"""The kombu transport for Apache CouchDB. Importing this package makes `couchdb://` and `couchdbs://` known to kombu."""

from __future__ import annotations

import warnings

__all__ = ['__version__', 'hook']

__version__ = '0.1.0'


def _register() -> None:
    # Strings: kombu imports the transport when the first connection is made, and nothing before that.
    from kombu.transport import TRANSPORT_ALIASES

    for scheme in ('couchdb', 'couchdbs'):
        TRANSPORT_ALIASES.setdefault(scheme, 'kombu_couchdb.transport:Transport')


try:
    _register()
except Exception as exc:  # kombu loads this in every app of the environment: it must break none, whatever kombu has become
    warnings.warn(f'couchdb:// could not be made known to kombu: {exc!r}', stacklevel=2)

#: What the entry point in the group `kombu.serializers` names. kombu loads that group when it is imported, so that a
#: Celery app need not import us; the "serializer" registered has no codec (kombu has no entry point for transports).
hook = (None, None, 'application/x-celery-couchdb')
