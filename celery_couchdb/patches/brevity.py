"""Error output in one sentence, without tracebacks for the errors of `kombu_couchdb.errors`: their texts are complete.

The `celery` program and the result backend of a worker call these functions. Other programs get exceptions as usual.
"""

from __future__ import annotations

import logging
import sys
from traceback import walk_tb
from types import TracebackType

from kombu.exceptions import OperationalError

from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.log import printable

__all__ = ['shorten_log', 'shorten_traceback']

#: The logger to which a worker writes the error that ends it.
_LOGGER = 'celery.worker'

#: The module with the `main` function of the `celery` program.
_PROGRAM = 'celery.bin.celery'


def shorten_log() -> None:
    """Remove our tracebacks from the line with which a worker ends, unless the logger's level is DEBUG."""
    logger = logging.getLogger(_LOGGER)
    logger.removeFilter(_remove_traceback)
    logger.addFilter(_remove_traceback)


def _remove_traceback(record: logging.LogRecord) -> bool:
    if record.exc_info and _is_ours(record.exc_info[1]) and not logging.getLogger(_LOGGER).isEnabledFor(logging.DEBUG):
        record.exc_info = None
    return True


def _is_ours(exc: BaseException | None) -> bool:
    """Tell whether an error is ours. kombu replaces one of the connection by its own, with the same text."""
    return isinstance(exc, CouchDBError) or (
        isinstance(exc, OperationalError) and isinstance(exc.__cause__, CouchDBError)
    )


def shorten_traceback() -> None:
    """Make the `celery` program end with one sentence and exit status 1 after one of our uncaught errors."""
    original = sys.excepthook

    def excepthook(kind: type[BaseException], exc: BaseException, traceback: TracebackType | None) -> None:
        if _is_ours(exc) and any(frame.f_globals.get('__name__') == _PROGRAM for frame, _ in walk_tb(traceback)):
            sys.stderr.write(f'Error: {printable(str(exc))}\n')
        else:
            original(kind, exc, traceback)

    sys.excepthook = excepthook
