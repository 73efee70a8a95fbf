"""Results: `AsyncResult.get` checks the earlier tasks of a chain, and the parts of a chord's header, with one request.

Celery reads their states one after the other, when `get` begins and then in each interval.
"""

from __future__ import annotations

from celery.result import AsyncResult

_check = AsyncResult._maybe_reraise_parent_error


def install() -> None:
    """Replace a method of Celery."""
    AsyncResult._maybe_reraise_parent_error = _check_together


def _check_together(self: AsyncResult) -> None:
    if (read := getattr(self.backend, 'read_earlier', None)) is not None:
        read(self)
    _check(self)
