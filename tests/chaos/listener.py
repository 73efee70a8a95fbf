"""The listener process: receives events as `celery events` does, and records in the ledger which ones."""

from __future__ import annotations

import logging
import signal
import sys
import time
from typing import Any

from .tasks import app, ledger

logger = logging.getLogger(__name__)

#: How long it waits before it connects again, in seconds.
_PAUSE = 0.2


def hear(event: dict[str, Any]) -> None:
    """Record an event that was received."""
    ledger.note('heard', number=event['number'], at=time.monotonic())


def main() -> None:
    """Receive events until SIGTERM."""
    logging.basicConfig(format='%(asctime)s %(levelname)s %(name)s %(message)s')
    signal.signal(signal.SIGTERM, lambda *args: sys.exit())
    while True:
        try:
            with app.connection_for_read() as connection:
                app.events.Receiver(connection, handlers={'chaos-news': hear}).capture(
                    limit=None, timeout=None, wakeup=False
                )
        except app.connection_for_read().recoverable_connection_errors as exc:
            logger.warning('connecting again: %r', exc)
            time.sleep(_PAUSE)


if __name__ == '__main__':
    main()
