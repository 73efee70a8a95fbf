"""Error output in one sentence, without tracebacks for the errors of `kombu_couchdb.errors`: their texts are complete.

Only a worker's log and the `celery` program are changed. Other programs get exceptions as usual.
"""

from __future__ import annotations

import logging
import sys
from traceback import walk_tb
from types import TracebackType

from kombu.exceptions import OperationalError

from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.log import printable

#: The logger to which a worker writes the error that ends it.
_LOGGER = 'celery.worker'

#: The module with the `main` function of the `celery` program.
_PROGRAM = 'celery.bin.celery'


def _shorten_log() -> None:
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


def _excepthook(kind: type[BaseException], exc: BaseException, traceback: TracebackType | None) -> None:
    """End the `celery` program with one sentence and exit status 1 after one of our uncaught errors."""
    if _is_ours(exc) and any(frame.f_globals.get('__name__') == _PROGRAM for frame, _ in walk_tb(traceback)):
        sys.stderr.write(f'Error: {printable(str(exc))}\n')
    else:
        _original(kind, exc, traceback)


_original = sys.excepthook


def install() -> None:
    """Shorten the log of a worker, and the traceback of the `celery` program in its process."""
    global _original
    _shorten_log()
    if _PROGRAM in sys.modules and sys.excepthook is not _excepthook:
        _original, sys.excepthook = sys.excepthook, _excepthook
