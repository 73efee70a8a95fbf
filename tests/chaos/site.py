"""The site of a run: databases, the proxies in front of them, workers, publishers and the ledger."""

from __future__ import annotations

import itertools
import json
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from kombu_couchdb.admin.status import status
from kombu_couchdb.errors import DatabaseMissing, NotFound
from kombu_couchdb.queues.databases import broadcasts_of

from .crew import POOLS, Listener, Place, Publisher, Settings
from .ledger import Ledger
from .proxy import Proxy
from .server import Server

__all__ = ['LEASE', 'Site', 'celery_settings', 'merged']

#: The visibility timeout of all workers, in seconds.
LEASE = 5.0

#: Transport options of all processes: short timeouts for requests, a long one for connecting.
_OPTIONS = {
    'visibility_timeout': LEASE,
    'request_timeout': 3.0,
    'connect_timeout': 1.0,
    'connect_retries_timeout': 600.0,
}

_PUBLISHERS = 2

#: How many results are read in a request.
_PART = 1000


class Site:
    """A context manager. On exit the processes end and the databases are deleted; the folder stays.

    `changes` are settings of Celery for all processes, in place of the suite's own; dictionaries are merged.
    """

    def __init__(self, server: Server, folder: Path, changes: Mapping[str, Any] | None = None) -> None:
        self.server, self.folder, self._changes = server, folder, changes or {}
        folder.mkdir(parents=True, exist_ok=True)
        self.database = f'chaos-{uuid.uuid4().hex[:12]}'
        self.results = f'{self.database}-results'
        self.client, self.result_client = server.client(self.database), server.client(self.results)
        self.ledger = Ledger(folder / 'ledger.jsonl')
        #: The network of the publishers; each place of a worker has its own proxy.
        self.proxy = Proxy(server.host, server.port)
        self.places = [
            Place(f'w{number}', pool, proxy := Proxy(server.host, server.port), self._settings(proxy), folder)
            for number, pool in enumerate(POOLS, 1)
        ]
        self.publishers: list[Publisher] = []
        self.listener: Listener | None = None
        #: A fault of the network holds it until the fault is healed.
        self.network = threading.Lock()
        self._numbers = itertools.count()

    def start(self) -> None:
        """Start all processes."""
        for place in self.places:
            place.start()
        self.publishers = [
            Publisher(self._settings(self.proxy), self.folder / 'publisher.log') for _ in range(_PUBLISHERS)
        ]
        self.listener = Listener(self._settings(self.proxy), self.folder / 'listener.log')

    def send(self, order: Mapping[str, Any]) -> None:
        """Send an order; the publishers take turns."""
        self.publishers[next(self._numbers) % _PUBLISHERS].send(json.dumps(order))

    def stored(self, keys: Sequence[str]) -> list[str]:
        """Return the keys of those tasks that have a result of success."""
        found: list[str] = []
        for start in range(0, len(keys), _PART):
            part = keys[start : start + _PART]
            docs = self.result_client.fetch([f'celery-task-meta-{key}' for key in part])
            found += [key for key, doc in zip(part, docs, strict=True) if doc and doc.get('status') == 'SUCCESS']
        return found

    def remains(self, living: set[int], unfinished: int = 0) -> list[str]:
        """Return, in sentences, what should not be in the databases when only the processes in `living` run.

        The documents of `unfinished` chords, which can never end, may remain until they expire.
        """
        now = status(self.client, temporary=True)
        found = [
            f'{count} messages are {state} in queue {name}'
            for name, queue in now['queues'].items()
            for state in ('ready', 'scheduled', 'prefetched', 'running', 'dead')
            if (count := queue[state])
        ]
        found += [f'{consumer["id"]} has a heartbeat' for consumer in now['consumers'] if consumer['pid'] not in living]
        leftovers = [row['id'] for row in self.result_client.id_range('chord-unlock-')]
        chords = {doc_id.partition(':')[0] for doc_id in leftovers}
        return found + [f'{doc_id} is a leftover of a chord' for doc_id in leftovers if len(chords) > unfinished]

    def _settings(self, proxy: Proxy) -> Settings:
        # Passwords are in URLs: they are passed to the processes in the environment only.
        broker, results = (self.server.url_through(proxy.port, name) for name in (self.database, self.results))
        return {
            'CHAOS_LEDGER': str(self.ledger.path),
            'CHAOS_SETTINGS': json.dumps(merged(celery_settings(broker, results), self._changes)),
        }

    def __enter__(self) -> Site:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for publisher in self.publishers:
            publisher.close()
        for place in self.places:
            place.kill()
        if self.listener is not None:
            self.listener.close()
        for proxy in [self.proxy, *(place.proxy for place in self.places)]:
            with proxy:
                pass
        for client in (self.client, broadcasts_of(self.client), self.result_client):
            with suppress(NotFound, DatabaseMissing):
                client.delete()


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with changes; a dictionary in both has the members of both."""
    return {
        **settings,
        **{
            name: {**settings[name], **value}
            if isinstance(settings.get(name), dict) and isinstance(value, dict)
            else value
            for name, value in changes.items()
        },
    }


def celery_settings(broker: str, results: str) -> dict[str, Any]:
    """Return the settings of Celery of all processes."""
    return {
        'broker_url': broker,
        'result_backend': results,
        'broker_transport_options': _OPTIONS,
        'result_backend_transport_options': {name: _OPTIONS[name] for name in ('request_timeout', 'connect_timeout')},
        'result_backend_always_retry': True,
        'broker_connection_retry_on_startup': True,
        'broker_connection_max_retries': None,
        'task_acks_late': True,
        'task_reject_on_worker_lost': True,
        'task_publish_retry_policy': {
            # For the next step of a chain, Celery 5.7 tries only four times if there is no limit.
            'max_retries': 1000,
            'interval_start': 0.1,
            'interval_step': 0.2,
            'interval_max': 1.0,
        },
        'worker_proc_alive_timeout': 60.0,  # a busy machine
    }
