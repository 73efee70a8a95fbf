"""Log lines cannot be forged by the values in them."""

from __future__ import annotations

import pytest

from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.log import get_logger

logger = get_logger('kombu_couchdb.tests.log')

#: A possible id of a document.
FORGED = 'abc\n[2026-11-22 10:00:00,000: INFO/MainProcess] all is well\x1b[2J\x9b'
SHOWN = r'abc\n[2026-11-22 10:00:00,000: INFO/MainProcess] all is well\x1b[2J\x9b'


@pytest.mark.parametrize(
    ('args', 'line'),
    [
        (('%s', FORGED), SHOWN),
        (('%r', FORGED), f"'{SHOWN}'"),
        (('%s', CouchDBError(FORGED)), SHOWN),
        (('%s', [FORGED]), f"['{SHOWN}']"),
        (('%(id)s', {'id': FORGED}), SHOWN),
        (('%d of %g, %s, %r', 3, 0.5, None, 'grün'), "3 of 0.5, None, 'grün'"),
        (('100 %',), '100 %'),
    ],
)
def test_log_record_is_one_line(args: tuple[object, ...], line: str, caplog: pytest.LogCaptureFixture) -> None:
    logger.warning(*args)
    assert [record.getMessage() for record in caplog.records] == [line]


def test_message_template_is_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    """Log collectors group records by their template."""
    logger.error('message %s is gone', FORGED)
    assert caplog.records[0].msg == 'message %s is gone'
