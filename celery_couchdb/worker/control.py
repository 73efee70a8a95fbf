"""The remote control commands `inspect scheduled` and `inspect stats` of workers that use CouchDB.

With CouchDB, planned tasks stay in the database until they are due; the worker does not hold them. So `scheduled` reads
them from the database. `stats` also says how long CouchDB took to respond.

Importing this module replaces Celery's commands; see `startup.prepare`.
"""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

from celery.worker.control import Panel, inspect_command

from kombu_couchdb.couchdb.call import time_limit
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.server import LATENCY
from kombu_couchdb.documents import validation, workitem
from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.log import get_logger
from kombu_couchdb.queues.store import Store

logger = get_logger(__name__)

#: The maximum number of planned tasks in the reply.
_MAX_TASKS = 100

#: How long the worker waits for CouchDB, at most. The worker runs commands in its event loop, so it does nothing else.
_PATIENCE_SECONDS = 2.0

#: Celery shows this priority for every task in a worker's timer.
_PRIORITY = 6

#: Celery's own commands: the tasks in the worker's timer, and statistics.
_scheduled_in_worker, _stats_of_worker = Panel.data['scheduled'], Panel.data['stats']


@inspect_command(alias='dump_schedule')
def scheduled(state: Any, **kwargs: Any) -> list[dict[str, Any]]:
    """List of currently scheduled ETA/countdown tasks."""
    held = list(_scheduled_in_worker(state, **kwargs))
    transport = state.consumer.connection.transport
    if transport.driver_type != 'couchdb':
        return held
    queues = [queue.name for queue in state.consumer.task_consumer.queues]
    try:
        with time_limit(min(_PATIENCE_SECONDS, transport.options.request_timeout)):
            held += [_describe(doc, state.hostname) for doc in _planned(transport.couchdb, queues)]
    except CouchDBError as exc:
        logger.warning('inspect scheduled shows only what this worker holds: %s', exc)
    except Exception:
        logger.exception('inspect scheduled shows only what this worker holds')
    return held


@inspect_command()
def stats(state: Any, **kwargs: Any) -> dict[str, Any]:
    """Request worker statistics/information."""
    found: dict[str, Any] = _stats_of_worker(state, **kwargs)
    requests = LATENCY.snapshot()
    return {**found, 'couchdb': {'requests': requests}} if requests['count'] or requests['failed'] else found


def _planned(client: Client, queues: list[str]) -> list[Document]:
    """Return the planned messages of these queues, ordered by due date."""
    now = client.clock.now()
    docs = Store(client).planned(queues, _MAX_TASKS)
    return [doc for doc in docs if not validation.malformed_reason(doc) and workitem.state(doc, now) == 'scheduled']


def _describe(doc: Document, hostname: str) -> dict[str, Any]:
    """Return the description of a planned task in Celery's format."""
    message = doc['message']
    headers, properties = message['headers'], message['properties']
    info = properties.get('delivery_info', {})
    args, kwargs = _arguments(message)
    try:
        eta = datetime.fromtimestamp(doc['date'], timezone.utc).isoformat()
    except (OverflowError, ValueError, OSError):  # beyond Python's last year
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
    """Return a task's arguments if the message has them as JSON text, otherwise Celery's text of each."""
    try:
        if message.get('content-type') == 'application/json' and message['properties'].get('body_encoding') == 'utf-8':
            args, kwargs, _ = json.loads(message['body'])
            return args, kwargs
    except (ValueError, TypeError):
        pass
    return message['headers'].get('argsrepr'), message['headers'].get('kwargsrepr')
