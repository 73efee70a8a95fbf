"""The patches of Celery: publishing, workers, and the output of errors and settings; and their installation.

kombu loads this module in every application of the environment: it imports nothing slow, and Celery only if the program
uses it. The patches are installed when kombu gets one of our URLs, whichever result backend the app has. (The result
backend installs those that it needs, too.) Until then a process is changed in nothing but the aliases of our schemes,
and the check of our URLs in `kombu_couchdb.registration`. docs/development/patches.rst has the reason of each patch.
This folder imports no other one.
"""

from __future__ import annotations

import sys
import warnings


def install() -> None:
    """Install the patches, if this program uses Celery."""
    if 'celery' in sys.modules:
        from . import output, publishing, workers

        for patch in (output, publishing, workers):
            patch.install()


try:
    from kombu_couchdb.registration import on_use

    on_use.append(install)
except Exception as exc:  # as in `kombu_couchdb`: an incompatible kombu must not break applications without CouchDB
    warnings.warn(f'the patches of celery_couchdb could not be registered: {exc!r}', stacklevel=2)

#: The target of an entry point in the group `kombu.serializers`, like `kombu_couchdb.hook`.
hook = (None, None, 'application/x-celery-couchdb')
