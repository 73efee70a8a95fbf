"""Events, as monitors such as Flower read them."""

from __future__ import annotations

import socket
import threading
from typing import Any

from celery import events

from tests.conftest import PATIENCE, wait_for

from .conftest import Site


def test_events(site: Site) -> None:
    seen: list[dict[str, Any]] = []
    site.app.connection_for_write().ensure_connection(max_retries=3).release()
    with site.app.connection_for_read() as connection:
        receiver: Any = events.EventReceiver(connection, app=site.app, handlers={'*': seen.append})
        finished = threading.Event()

        def capture() -> None:
            with receiver.consumer_context():
                listening.set()
                while not finished.is_set():
                    try:
                        connection.drain_events(timeout=0.5)
                    except socket.timeout:
                        pass

        listening = threading.Event()
        thread = threading.Thread(target=capture)
        thread.start()
        try:
            assert listening.wait(PATIENCE)
            worker = site.worker('-E')
            good, bad = site.send('add', 1, 1), site.send('fail', 'on purpose')

            def types(task_id: str) -> list[str]:
                return [event['type'] for event in list(seen) if event.get('uuid') == task_id]

            wait_for(lambda: 'task-succeeded' in types(good.id), 'the events of a task that succeeds')
            wait_for(lambda: 'task-failed' in types(bad.id), 'the events of a task that fails')
            assert types(good.id) == ['task-received', 'task-started', 'task-succeeded']
            wait_for(lambda: {'worker-online', 'worker-heartbeat'} <= {event['type'] for event in list(seen)})
            assert {event['hostname'] for event in list(seen)} == {worker.name}
            worker.terminate()
            wait_for(lambda: 'worker-offline' in {event['type'] for event in list(seen)}, 'the last event')
        finally:
            finished.set()
            thread.join()
