"""Loggers whose lines cannot be forged by the text that they quote.

Ids, names of queues and tasks, reasons and what servers answer can be any text, and anybody who may write to the database may
have chosen it. Line breaks and escape sequences in it are logged as `\\n` and `\\x1b`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import kombu.log

__all__ = ['get_logger', 'printable']


def get_logger(name: str) -> logging.Logger:
    """Return the logger of this name, as `kombu.log` does; what is filled into its lines is made printable."""
    logger: logging.Logger = kombu.log.get_logger(name)
    logger.addFilter(_make_printable)
    return logger


def printable(text: str) -> str:
    """Return text in one line: control characters, line breaks and what changes the direction of writing as escapes."""
    if text.isprintable():
        return text
    return ''.join(char if char.isprintable() else char.encode('unicode_escape').decode() for char in text)


class _Printable:
    """Stands for a value that is filled into a line."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __str__(self) -> str:
        return printable(str(self._value))

    def __repr__(self) -> str:
        return printable(repr(self._value))


def _make_printable(record: logging.LogRecord) -> bool:
    if isinstance(record.args, Mapping):
        record.args = {name: _shown(value) for name, value in record.args.items()}
    elif record.args:
        record.args = tuple(map(_shown, record.args))
    return True


def _shown(value: Any) -> Any:
    return value if isinstance(value, (int, float)) else _Printable(value)
