"""Calls with a time limit for all their requests together, in threads that the program does not wait for at its end.

The time limits of a client apply to each request, and to each node. A name server may not respond either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import click

from kombu_couchdb.errors import ServerUnavailable

from .tables import Number

__all__ = ['result_of', 'seconds_option', 'start']

T = TypeVar('T')


def seconds_option(name: str, default: float, text: str, *, least: float = 0.1) -> Callable[[Any], Any]:
    """Return the decorator of an option with a number of seconds; `text` is its help."""
    return click.option(name, metavar='SECONDS', default=default, show_default=True, type=Number(least), help=text)


def start(function: Callable[[], T]) -> Future[T]:
    """Call a function in a new thread, and return the future of its result."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as exc:
            future.set_exception(exc)

    threading.Thread(target=run, name='celery-couchdb-command', daemon=True).start()
    return future


def result_of(future: Future[T], seconds: float) -> T:
    """Return the result of a call, or raise its error; *raises* `ServerUnavailable` after `seconds` without either."""
    wait([future], seconds)
    if not future.done():
        raise ServerUnavailable(f'CouchDB has not responded within {seconds:g} s')
    return future.result()
