"""Events, as monitors such as Flower receive them."""

from __future__ import annotations

import threading
from typing import Any

from kombu_couchdb.errors import DatabaseMissing
from tests.conftest import wait_for

from .conftest import Site


def listening(site: Site) -> bool:
    try:
        return bool(site.client.id_range('broker:consumer:'))
    except DatabaseMissing:
        return False


def test_events(site: Site) -> None:
    seen: list[dict[str, Any]] = []
    with site.app.connection_for_read() as connection:
        receiver: Any = site.app.events.Receiver(connection, handlers={'*': seen.append})
        thread = threading.Thread(target=receiver.capture, kwargs={'limit': None, 'timeout': None, 'wakeup': False})
        thread.start()
        try:
            wait_for(lambda: listening(site), 'the receiver to be ready')
            worker = site.worker('-E')
            good, bad = site.send('add', 1, 1), site.send('fail', 'on purpose')

            def types(task_id: str) -> list[str]:
                return [event['type'] for event in list(seen) if event.get('uuid') == task_id]

            wait_for(lambda: 'task-succeeded' in types(good.id), 'the events of the successful task')
            wait_for(lambda: 'task-failed' in types(bad.id), 'the events of the failed task')
            assert types(good.id) == ['task-received', 'task-started', 'task-succeeded']
            wait_for(lambda: {'worker-online', 'worker-heartbeat'} <= {event['type'] for event in list(seen)})
            assert {event['hostname'] for event in list(seen)} == {worker.hostname()}
            worker.container.terminate()
            wait_for(lambda: 'worker-offline' in {event['type'] for event in list(seen)}, 'the last event')
        finally:
            receiver.should_stop = True
            thread.join()
