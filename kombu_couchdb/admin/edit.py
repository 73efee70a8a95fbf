"""Changes of waiting jobs: another queue, due date, priority or message."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from ..couchdb.bulk import ATTEMPTS
from ..couchdb.client import Client, Document
from ..documents import validation, workitem
from ..documents.concurrency import unpark
from ..documents.task_message import HIGHEST
from ..documents.validation import check_names, check_value
from ..errors import ConfigurationError, NotChangeable
from ..queues.topology import Topology
from .jobs import find

#: The default of arguments that may be None.
UNCHANGED: Any = object()


def change(client: Client, task_id: str, edit: Callable[[Document], Document]) -> Document:
    """Write `edit(item)` in place of the waiting item of a job, and return it.

    The item is written in the revision that was read, so a worker that claims it at this moment either gets the new
    message, or makes this call fail. A job that waits for a slot of its concurrency key looks for one anew: parked with
    a later due date or in another queue, it would be woken in the place of a job that can run. *Raises* `NotChangeable`
    if the job is not waiting, and what `edit` raises.
    """
    for _ in range(ATTEMPTS):
        doc = _waiting(client, task_id)
        edited = unpark(edit(doc))
        check_value('the job', edited)
        [result] = client.bulk([edited])
        if result.is_stored:
            return {**edited, '_rev': result.rev}
        if not result.is_conflict:
            raise result.exception(client.address.url)
    raise NotChangeable(f'job {task_id} was changed by others at each of {ATTEMPTS} attempts')


def _waiting(client: Client, task_id: str) -> Document:
    """Return the one item of a job that waits and can be changed; *raises* `NotChangeable`."""
    docs, now = find(client, task_id), client.clock.now()
    waiting = [doc for doc in docs if workitem.is_waiting(doc) and not doc.get('behind')]
    if len(waiting) > 1:
        ids = ', '.join(doc['_id'] for doc in waiting)
        raise NotChangeable(
            f'job {task_id} has {len(waiting)} messages that wait: name one by the id of its document ({ids})'
        )
    if not waiting:
        if any(doc.get('behind') for doc in docs):
            raise NotChangeable(
                f'job {task_id} waits behind a running unique job and cannot be changed before that has ended'
            )
        why = {
            'prefetched': 'a worker holds it',
            'dead': 'it is a dead letter; see "failures retry"',
            'done': 'it is done',
        }
        states = [workitem.state(doc, now) for doc in docs]
        raise NotChangeable(
            f'job {task_id} cannot be changed: {next((why[s] for s in why if s in states), "it is not in a queue")}'
        )
    if reason := validation.flaw(waiting[0]):
        raise NotChangeable(f'job {task_id} cannot be changed: {reason}')
    if workitem.has_expired(waiting[0], now):
        raise NotChangeable(f'job {task_id} cannot be changed: it has expired')
    return waiting[0]


def check_queue(client: Client, queue: str) -> None:
    """Check that a queue has been declared; *raises* `ConfigurationError` if not."""
    check_names(queue=queue)
    if not queue or not Topology(client).has_queue(queue):
        raise ConfigurationError(f'there is no queue {queue!r:.80}: name one that a worker or a publisher has declared')


def in_queue(doc: Document, queue: str) -> Document:
    """Return an item as one of another queue; *raises* `NotChangeable` if it is a unique job, or malformed."""
    message = doc.get('message')
    properties = message.get('properties') if isinstance(message, dict) else None
    if 'key' in doc:
        raise NotChangeable('it is a unique job, which cannot be moved to another queue')
    if not isinstance(message, dict) or not isinstance(properties, dict):
        raise NotChangeable('its message is malformed')
    # Celery sends a retry to where the message came from.
    info = properties.get('delivery_info')
    info = {**(info if isinstance(info, dict) else {}), 'exchange': '', 'routing_key': queue}
    return {**doc, 'queue': queue, 'message': {**message, 'properties': {**properties, 'delivery_info': info}}}


def move(
    client: Client,
    task_id: str,
    *,
    queue: str | None = None,
    eta: datetime | None = UNCHANGED,
    priority: int | None = None,
) -> Document:
    """Move a waiting job to another queue, due date or priority, and return its document.

    `eta` None makes it due at once; a date without a time zone is UTC. *Raises* `NotChangeable` if the job is not
    waiting, or is a unique job and `queue` is given; `ConfigurationError` if the queue is not declared, or a value is
    wrong.
    """
    if queue is None and eta is UNCHANGED and priority is None:
        raise ConfigurationError('nothing to change: give a queue, a due date or a priority')
    if priority is not None and (type(priority) is not int or not 0 <= priority <= HIGHEST):
        raise ConfigurationError(f'the priority must be a whole number from 0 to {HIGHEST}, not {priority!r:.80}')
    if queue is not None:
        check_queue(client, queue)
    if eta is not None and eta is not UNCHANGED:
        if not isinstance(eta, datetime):
            raise ConfigurationError(f'the due date must be a datetime or None, not {eta!r:.80}')
        eta = (eta if eta.tzinfo else eta.replace(tzinfo=timezone.utc)).astimezone(timezone.utc)

    def edit(doc: Document) -> Document:
        if queue is not None and queue != doc['queue']:
            doc = in_queue(doc, queue)
        message, more = doc['message'], dict[str, Any]()
        if priority is not None:
            message = {**message, 'properties': {**message['properties'], 'priority': priority}}
            more['priority'] = priority
        if eta is not UNCHANGED:
            more['date'] = None if eta is None else eta.timestamp()
            # The worker reads it, too, and would wait until then.
            headers = {**message['headers'], 'eta': None if eta is None else eta.isoformat()}
            message = {**message, 'headers': headers}
        moved = {**doc, **more, 'message': message}
        if moved.get('expires') is not None and (moved['date'] or 0) >= moved['expires']:
            raise NotChangeable(f'job {task_id} expires before it would be due')
        return moved

    return change(client, task_id, edit)
