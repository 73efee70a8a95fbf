"""Texts for the report."""

from __future__ import annotations

import re

__all__ = ['in_one_line']


def in_one_line(error: BaseException) -> str:
    """Return an error as one line of at most 200 characters, without the users and passwords in URLs.

    >>> in_one_line(ValueError('no way to amqp://guest:secret@localhost:5672'))
    'ValueError: no way to amqp://localhost:5672'
    """
    text = ' '.join(f'{type(error).__name__}: {error}'.split())
    return re.sub(r'//[^/\s]*@', '//', text)[:200]
