"""What is logged while something fails again and again, and how long its owner pauses."""

from __future__ import annotations

import logging
import time
from math import inf

import pytest

from kombu_couchdb.errors import AccessDenied, CouchDBError, ServerUnavailable
from kombu_couchdb.log import get_logger
from kombu_couchdb.outage import LONGEST_PAUSE_SECONDS, Outage

logger = get_logger('kombu_couchdb.tests.outage')


@pytest.fixture
def outage() -> Outage:
    return Outage(logger, 'nothing is stored: %s', 'all is stored again')


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_outage_is_logged_once_and_so_is_its_end(outage: Outage, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        outage.recovered()
        for number in range(3):
            outage.failed(ServerUnavailable(f'no {number}'))
        assert outage.lasts
        outage.recovered()
        assert not outage.lasts
    assert lines(caplog) == 2 * [('WARNING', 'nothing is stored: no 0'), ('WARNING', 'all is stored again')]


def test_pauses_become_longer_until_a_success(outage: Outage) -> None:
    pauses = [outage.failed(ServerUnavailable('no')) for _ in range(7)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, LONGEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS]
    assert time.monotonic() < outage.until <= time.monotonic() + LONGEST_PAUSE_SECONDS
    outage.recovered()
    assert outage.until == -inf
    assert outage.failed(ServerUnavailable('no'), least=60.0) == 60.0
    assert outage.failed(ServerUnavailable('no')) == LONGEST_PAUSE_SECONDS


def test_error_of_another_class_is_logged_too(outage: Outage, caplog: pytest.LogCaptureFixture) -> None:
    for error in (ServerUnavailable('away'), AccessDenied('refused'), ServerUnavailable('away'), AccessDenied('no')):
        outage.failed(error, f'{error}!')
    assert lines(caplog) == [('WARNING', 'nothing is stored: away!'), ('ERROR', 'nothing is stored: refused!')]


def test_unexpected_error_is_logged_with_its_traceback(outage: Outage, caplog: pytest.LogCaptureFixture) -> None:
    outage.failed(KeyError('x'))
    assert lines(caplog) == [('ERROR', 'nothing is stored: an unexpected error')]
    assert "KeyError: 'x'" in caplog.text


def test_cause_of_an_error_of_kombu_counts(outage: Outage, caplog: pytest.LogCaptureFixture) -> None:
    error = OSError('kombu: away')
    error.__cause__ = ServerUnavailable('away')
    outage.failed(error)
    assert lines(caplog) == [('WARNING', 'nothing is stored: kombu: away')]


def test_level_may_be_fixed_and_the_end_silent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    outage = Outage(logger, 'not followed: %s', level=logging.DEBUG)
    outage.failed(CouchDBError('no'))
    outage.recovered()
    assert lines(caplog) == [('DEBUG', 'not followed: no')]
