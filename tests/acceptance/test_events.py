"""Events, as monitors such as Flower receive them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kombu_couchdb.errors import DatabaseMissing
from tests.conftest import PATIENCE, SHORT_LEASE, wait_for
from tests.support import ROOT

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


@contextmanager
def monitor(site: Site, log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run `celery events`, which writes the events to `log`."""
    settings = json.dumps({'broker_transport_options': options})
    with log.open('wb') as file:
        process = subprocess.Popen(
            [sys.executable, '-u', '-m', 'celery', '-A', 'tests.acceptance.app', 'events', '--dump'],
            cwd=ROOT,
            env={**os.environ, **site.environment, 'SETTINGS': settings},
            stdout=file,
            stderr=file,
        )
    try:
        yield process
    finally:
        process.kill()
        process.send_signal(signal.SIGCONT)
        process.wait()


def test_monitor_continues_after_a_pause_longer_than_its_lease(site: Site, tmp_path: Path) -> None:
    """Workers delete the queue of the paused monitor. The monitor declares it again and continues."""

    def queues() -> list[str]:
        return [row['id'] for row in site.client.id_range('broker:queue:celeryev.')]

    log = tmp_path / 'log'
    site.worker('-E', broker_transport_options=SHORT_LEASE)
    with monitor(site, log, **SHORT_LEASE) as process:
        wait_for(lambda: listening(site) and queues(), 'the monitor to be ready')
        first = site.send('add', 1, 1)
        wait_for(lambda: f'{first.id}' in log.read_text(), 'the first events')
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: not queues(), 'its queue to be deleted')
        site.send('add', 2, 2).get(timeout=PATIENCE)
        process.send_signal(signal.SIGCONT)
        wait_for(queues, 'its queue to be declared again')
        last = site.send('add', 3, 3)
        wait_for(lambda: f'{last.id}' in log.read_text(), 'the last events')
