"""Uncaught errors of these packages are printed as one sentence (`celery_couchdb.patches.output`)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from kombu.exceptions import OperationalError

from celery_couchdb.patches import output
from kombu_couchdb.errors import AccessDenied, ConfigurationError, ServerUnavailable

LOGGER = logging.getLogger('celery.worker')


def logged(caplog: pytest.LogCaptureFixture, exc: Exception, level: int) -> str:
    """Return the log of a worker that an error ends."""
    output.install()
    output.install()  # the first connection and the backend both call it
    with caplog.at_level(level, LOGGER.name):
        try:
            raise exc
        except Exception as caught:
            LOGGER.critical('Unrecoverable error: %r', caught, exc_info=True)
    return caplog.text


@pytest.mark.parametrize(
    ('exc', 'level'), [(AccessDenied('no right'), logging.DEBUG), (ValueError('a fault'), logging.INFO)]
)
def test_traceback_is_logged_for_other_errors_and_at_debug_level(
    caplog: pytest.LogCaptureFixture, exc: Exception, level: int
) -> None:
    assert 'Traceback' in logged(caplog, exc, level)


def told(monkeypatch: pytest.MonkeyPatch, exc: Exception, module: str) -> list[Any]:
    """Raise an uncaught error in a module; return the arguments of the original excepthook if it was called."""
    others: list[Any] = []
    monkeypatch.setattr(sys, 'excepthook', lambda *args: others.append(args))
    monkeypatch.setitem(sys.modules, 'celery.bin.celery', ModuleType('celery.bin.celery'))
    output.install()
    names: dict[str, Callable[[], None]] = {}
    exec('def main():\n    raise exc', {'__name__': module, 'exc': exc}, names)
    try:
        names['main']()
    except Exception:
        sys.excepthook(*sys.exc_info())
    return others


def test_errors_that_kombu_has_replaced_are_shortened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replaced = OperationalError('no server listens')
    replaced.__cause__ = ServerUnavailable('no server listens')
    assert told(monkeypatch, replaced, 'celery.bin.celery') == []
    assert capsys.readouterr().err == 'Error: no server listens\n'
    assert told(monkeypatch, OperationalError('of another broker'), 'celery.bin.celery') != []


@pytest.mark.parametrize(('exc', 'module'), [(ConfigurationError('x'), 'shop'), (ValueError('x'), 'celery.bin.celery')])
def test_other_programs_and_errors_are_unchanged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], exc: Exception, module: str
) -> None:
    [(kind, value, traceback)] = told(monkeypatch, exc, module)
    assert (kind, value) == (type(exc), exc)
    assert traceback is not None
    assert capsys.readouterr().err == ''
