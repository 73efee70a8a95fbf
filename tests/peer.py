"""A consumer in a process of its own, controlled through standard input. See `support.Peer`."""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
from typing import Any


def tell(**event: Any) -> None:
    """Report an event to the test, as a line of JSON on standard output."""
    print(json.dumps(event), flush=True)


def main() -> None:
    """Consume until standard input ends."""
    given = json.loads(sys.stdin.readline())
    true_time = time.time
    if given['skew']:
        time.time = lambda: true_time() + given['skew']
    import kombu

    import kombu_couchdb  # noqa: F401 - makes the scheme known
    from tests.patience import PatientConnection

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format='%(levelname)s %(name)s %(message)s')
    commands: queue.Queue[str | None] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            commands.put(json.loads(line))
        commands.put(None)

    threading.Thread(target=listen, daemon=True).start()
    held: list[Any] = []

    def on_message(message: Any) -> None:
        if given['ack']:
            message.ack()
        else:
            held.append(message)
        tell(got=message.decode(), at=true_time())

    with PatientConnection(given['url'], transport_options=given['options']) as connection:
        exchange = kombu.Exchange(given['fanout'], type='fanout') if given['fanout'] else None
        entity = kombu.Queue(given['queue'], exchange, auto_delete=given['auto_delete'])
        with kombu.Consumer(connection.channel(), [entity], on_message=on_message, accept=['json']):
            tell(ready=True)
            while True:
                try:
                    connection.drain_events(timeout=0.1)
                except TimeoutError:
                    pass
                try:
                    command = commands.get_nowait()
                except queue.Empty:
                    continue
                if command is None:
                    return
                if command == 'ack':
                    for message in held:
                        message.ack()
                    held.clear()
                tell(done=command)


if __name__ == '__main__':
    main()
