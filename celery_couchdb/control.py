"""`inspect scheduled`, for a worker whose broker is CouchDB: the database holds planned tasks, and not the worker.

Importing this module replaces Celery's command. The `celery` program does that when it starts a worker, and the result backend
when a worker is ready. A program that makes a worker by `app.Worker()` with another result backend imports this module itself.
"""

from __future__ import annotations

import json
import threading
from datetime import datetime, timezone
from typing import Any

from celery.worker.control import Panel, inspect_command

from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.documents import workitem
from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.log import get_logger
from kombu_couchdb.queues.store import Store

__all__ = ['scheduled']

logger = get_logger(__name__)

#: How many planned tasks are shown.
_SHOWN = 100

#: How long the worker waits for CouchDB at the most, in seconds: as any command, this one is executed in its event loop.
_PATIENCE_SECONDS = 2.0

#: The priority that Celery shows for every task that waits for its time.
_PRIORITY = 6

_held_by_worker = Panel.data['scheduled']


@inspect_command(alias='dump_schedule')
def scheduled(state: Any, **kwargs: Any) -> list[dict[str, Any]]:
    """List of currently scheduled ETA/countdown tasks."""
    held = list(_held_by_worker(state, **kwargs))
    transport = state.consumer.connection.transport
    if transport.driver_type != 'couchdb':
        return held
    queues = [queue.name for queue in state.consumer.task_consumer.queues]
    planned: list[dict[str, Any]] = []

    def read() -> None:
        try:
            planned.extend(_shown(doc, state.hostname) for doc in _planned(transport.couchdb, queues))
        except CouchDBError as exc:
            logger.warning('inspect scheduled shows only what this worker holds: %s', exc)
        except Exception:
            logger.exception('inspect scheduled shows only what this worker holds')

    # A thread, for a request may take longer than its timeout: it is sent to each node in turn.
    thread = threading.Thread(target=read, name='celery-couchdb-inspect', daemon=True)
    thread.start()
    patience = min(_PATIENCE_SECONDS, transport.options.request_timeout)
    thread.join(patience)
    if thread.is_alive():
        logger.warning(
            'inspect scheduled shows only what this worker holds: CouchDB has not answered within %g s', patience
        )
    return held + planned


def _planned(client: Client, queues: list[str]) -> list[Document]:
    """Return the items of these queues that are due first of those that are due later."""
    now = client.clock.now()
    docs = Store(client).planned(queues, _SHOWN)
    return [doc for doc in docs if not workitem.flaw(doc) and workitem.state(doc, now) == 'scheduled']


def _shown(doc: Document, hostname: str) -> dict[str, Any]:
    """Return what Celery shows of a task that waits for its time."""
    message = doc['message']
    headers, properties = message['headers'], message['properties']
    info = properties.get('delivery_info', {})
    args, kwargs = _arguments(message)
    try:
        eta = datetime.fromtimestamp(doc['date'], timezone.utc).isoformat()
    except (OverflowError, ValueError, OSError):  # in more years than Python can count
        eta = str(headers.get('eta'))
    return {
        'eta': eta,
        'priority': _PRIORITY,
        'request': {
            'id': headers.get('id'),
            'name': headers.get('shadow') or headers.get('task'),
            'args': args,
            'kwargs': kwargs,
            'type': headers.get('task'),
            'hostname': hostname,
            'time_start': None,
            'acknowledged': False,
            'worker_pid': None,
            'delivery_info': {
                'exchange': info.get('exchange'),
                'routing_key': info.get('routing_key'),
                'priority': properties.get('priority'),
                'redelivered': 'consumer' in doc,
            },
        },
    }


def _arguments(message: Document) -> tuple[Any, Any]:
    """Return a task's arguments if its message has them as JSON text, else Celery's descriptions of them."""
    try:
        if message.get('content-type') == 'application/json' and message['properties'].get('body_encoding') == 'utf-8':
            args, kwargs, _ = json.loads(message['body'])
            return args, kwargs
    except (ValueError, TypeError):
        pass
    return message['headers'].get('argsrepr'), message['headers'].get('kwargsrepr')
