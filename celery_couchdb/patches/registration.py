"""Installation of the patches of Celery at the moment when kombu resolves one of our schemes for the first time.

That is when the first connection to CouchDB is made, whichever result backend the app has. Until then a process is
changed in nothing but the aliases of our schemes, so an app that does not use CouchDB is not changed.

kombu loads this module in every application of the environment: it imports nothing slow, and Celery only if the program
uses it.
"""

from __future__ import annotations

import sys
import warnings

__all__ = ['hook']

_TRANSPORT = 'kombu_couchdb.transport:Transport'


def _resolve() -> str:
    """Install the patches, and return the name of the transport; kombu calls this instead of reading an alias."""
    if 'celery' in sys.modules:
        from . import groups, lifecycle, next_tasks, redaction

        for patch in (groups, lifecycle, next_tasks, redaction):
            patch.install()
    return _TRANSPORT


def _register() -> None:
    """Replace the aliases that `kombu_couchdb` has registered."""
    from kombu.transport import TRANSPORT_ALIASES

    import kombu_couchdb  # noqa: F401 - it registers them

    for scheme in ('couchdb', 'couchdbs'):
        if TRANSPORT_ALIASES.get(scheme) == _TRANSPORT:
            TRANSPORT_ALIASES[scheme] = _resolve


try:
    _register()
except Exception as exc:  # as in `kombu_couchdb`: an incompatible kombu must not break applications without CouchDB
    warnings.warn(f'the patches of celery_couchdb could not be registered: {exc!r}', stacklevel=2)

#: The target of an entry point in the group `kombu.serializers`, like `kombu_couchdb.hook`.
hook = (None, None, 'application/x-celery-couchdb')
