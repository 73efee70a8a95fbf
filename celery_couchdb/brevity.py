"""One-sentence error output: no traceback for an error of ours, whose text says everything.

The `celery` program and the result backend of a worker call these functions. Other programs get exceptions as usual.
"""

from __future__ import annotations

import logging
import sys
from traceback import walk_tb
from types import TracebackType

from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.log import printable

__all__ = ['shorten_log', 'shorten_traceback']

#: Where a worker logs the error that ends it.
_LOGGER = 'celery.worker'

#: The module whose `main` is the `celery` program.
_PROGRAM = 'celery.bin.celery'


def shorten_log() -> None:
    """Leave tracebacks of our errors out of the line with which a worker ends, unless its level is DEBUG."""
    logger = logging.getLogger(_LOGGER)
    logger.removeFilter(_without_traceback)
    logger.addFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    if (
        record.exc_info
        and isinstance(record.exc_info[1], CouchDBError)
        and not logging.getLogger(_LOGGER).isEnabledFor(logging.DEBUG)
    ):
        record.exc_info = None
    return True


def shorten_traceback() -> None:
    """Let the `celery` program end with one sentence, and status 1, on an error of ours that nobody has caught."""
    before = sys.excepthook

    def say(kind: type[BaseException], exc: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(exc, CouchDBError) and any(
            frame.f_globals.get('__name__') == _PROGRAM for frame, _ in walk_tb(traceback)
        ):
            sys.stderr.write(f'Error: {printable(str(exc))}\n')
        else:
            before(kind, exc, traceback)

    sys.excepthook = say
