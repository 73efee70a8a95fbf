"""A process with several consumers of one queue, each with a connection of its own: part of `tests.chaos.fleet`."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from kombu import Connection, Queue

from .ledger import Ledger

__all__ = ['LEASE', 'OPTIONS', 'QUEUE']

#: The queue, and the visibility timeout in seconds: longer than a busy machine leaves a process waiting.
QUEUE, LEASE = 'fleet', 15.0

#: The transport options of all consumers and of the publisher.
OPTIONS = {
    'visibility_timeout': LEASE,
    'request_timeout': 5.0,
    'connect_timeout': 2.0,
    'connect_retries_timeout': 600.0,
}


def consume(url: str, ledger: Ledger) -> None:
    """Consume messages for ever, one at a time; each says for how many seconds it is worked on."""

    def work(body: dict[str, Any], message: Any) -> None:
        ledger.note('start', key=body['key'], pid=os.getpid(), at=time.monotonic())
        time.sleep(body['seconds'])
        ledger.note('end', key=body['key'], pid=os.getpid(), at=time.monotonic())
        message.ack()

    while True:
        connection = Connection(url, transport_options=OPTIONS)
        try:
            with connection.Consumer(Queue(QUEUE), callbacks=[work], accept=['json'], prefetch_count=1):
                while True:
                    try:
                        connection.drain_events(timeout=5.0)
                    except TimeoutError:
                        pass
        except connection.recoverable_connection_errors as exc:
            print(f'connecting again: {exc!r}', file=sys.stderr, flush=True)
            time.sleep(0.2)
        finally:
            connection.release()


def main() -> None:
    """Start the number of consumers that the argument says, and wait to be killed."""
    url, ledger = os.environ['CHAOS_BROKER'], Ledger(Path(os.environ['CHAOS_LEDGER']))
    for _ in range(int(sys.argv[1])):
        threading.Thread(target=consume, args=(url, ledger), daemon=True).start()
    threading.Event().wait()


if __name__ == '__main__':
    main()
