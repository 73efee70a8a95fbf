"""Output of Celery: errors in one sentence without a traceback, and settings with masked passwords.

The texts of the errors of `kombu_couchdb.errors` are complete. Only a worker's log and the `celery` program are
changed. Other programs get exceptions as usual.

Settings are shown by `inspect conf`, `inspect report`, `celery report` and `celery graph workers`. Celery masks them by
name, and each version misses some: before 5.7 `broker_read_url` and `broker_write_url`, in 5.7 `CELERY_BROKER_URL` of
Django's settings. This module finds our URLs in the values.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from traceback import walk_tb
from types import TracebackType
from typing import Any

from celery.app import utils
from celery.utils.graph import GraphFormatter
from kombu.exceptions import OperationalError
from kombu.utils.encoding import safe_repr

from kombu_couchdb import registration
from kombu_couchdb.couchdb.address import redacted
from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.log import printable

#: The logger to which a worker writes the error that ends it.
_LOGGER = 'celery.worker'

#: The module with the `main` function of the `celery` program.
_PROGRAM = 'celery.bin.celery'

#: Celery's mask.
_MASK = '*' * 8

_OURS = re.compile('couchdbs?://', re.IGNORECASE)

#: The original functions. Before 5.7 Celery had no `sanitize_url`.
_excepthook_before = sys.excepthook
_filter_by_name = utils.filter_hidden_settings
_sanitize = getattr(utils, 'sanitize_url', None)
_format_graph = GraphFormatter.FMT


def install() -> None:
    """Replace functions of Celery and kombu; in a `celery` program, also Python's function for uncaught errors."""
    global _excepthook_before
    registration.mask()
    utils.filter_hidden_settings, GraphFormatter.FMT = filter_hidden_settings, _format_masked
    if _sanitize:  # before 5.7 Celery calls kombu's function
        utils.sanitize_url = _sanitize_url
    logging.getLogger(_LOGGER).addFilter(_remove_traceback)
    if _PROGRAM in sys.modules and sys.excepthook is not _excepthook:
        _excepthook_before, sys.excepthook = sys.excepthook, _excepthook


# -- errors


def _remove_traceback(record: logging.LogRecord) -> bool:
    """Remove our traceback from the line with which a worker ends, unless the logger's level is DEBUG."""
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
        _excepthook_before(kind, exc, traceback)


# -- settings


def filter_hidden_settings(conf: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a copy of settings with masked secrets: passwords in our URLs, and what Celery masks by name."""
    masked = {key: _mask(value) for key, value in conf.items()}
    others = {
        key: value for key, value in conf.items() if masked[key] is value or utils.HIDDEN_SETTINGS.search(str(key))
    }
    return {**masked, **_filter_by_name(others)}


def _sanitize_url(url: Any, mask: str = _MASK) -> Any:
    return redacted(url, mask) if isinstance(url, str) and _OURS.match(url) else _sanitize(url, mask)  # type: ignore[misc]


def _mask(value: Any) -> Any:
    """Return a masked copy of a value with our URLs; any other value itself. Of an object that is what is shown."""
    if isinstance(value, str):
        return redacted(value, _MASK) if _OURS.search(value) else value
    if not _OURS.search(shown := safe_repr(value)):
        return value
    if isinstance(value, Mapping):
        return {_mask(key): _mask(member) for key, member in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        masked = map(_mask, value)
        return [*masked] if isinstance(value, list) else (*masked,)
    return redacted(shown, _MASK)


def _format_masked(self: Any, fmt: str, *args: Any, **kwargs: Any) -> Any:
    """Format a node of `celery graph workers`, whose label may be the URL of a result backend."""
    labels = (redacted(label) if isinstance(label, str) and _OURS.match(label) else label for label in args)
    return _format_graph(self, fmt, *labels, **kwargs)
