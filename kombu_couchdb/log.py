"""Loggers, and protection of their lines against forged text.

The two root loggers are `kombu_couchdb` (the transport) and `celery_couchdb` (results, parcels and the workers' part).
Each module logs to a child with its own name, such as `kombu_couchdb.consumer.claims`, so that the level of a root
sets the level of the whole package.

Document ids, names of queues and tasks, reasons and the server's texts can contain anything, and everybody with write
access to the database can choose them. Line breaks and escape sequences in these arguments are logged as `\\n` and
`\\x1b`, so that an argument cannot look like another log line.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import kombu.log


def get_logger(name: str) -> logging.Logger:
    """Return the logger `name`, as `kombu.log.get_logger` does, with a filter that makes arguments printable.

    Pass `__name__`: then the logger is below `kombu_couchdb` or `celery_couchdb`.
    """
    logger: logging.Logger = kombu.log.get_logger(name)
    logger.addFilter(_make_printable)
    return logger


def printable(text: str) -> str:
    """Return `text` in one line: line breaks, control and bidirectional characters become escapes such as `\\n`."""
    if text.isprintable():
        return text
    return ''.join(char if char.isprintable() else char.encode('unicode_escape').decode() for char in text)


class _Printable:
    """A wrapper around one argument of a log line. Formatting happens only if the line is written."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __str__(self) -> str:
        return printable(str(self._value))

    def __repr__(self) -> str:
        return printable(repr(self._value))


def _make_printable(record: logging.LogRecord) -> bool:
    if isinstance(record.args, Mapping):
        record.args = {name: _wrap(value) for name, value in record.args.items()}
    elif record.args:
        record.args = tuple(map(_wrap, record.args))
    return True


def _wrap(value: Any) -> Any:
    return value if isinstance(value, (int, float)) else _Printable(value)  # numbers may be formatted by %d or %g
