"""A warning of `celery migrate` about the messages that it leaves in CouchDB: those that are due later.

Other brokers deliver such a message at once, and the worker waits. CouchDB delivers it when it is due.
"""

from __future__ import annotations

import click
from kombu import Connection

from kombu_couchdb import design
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.shapes import anything, exactly, members, number
from kombu_couchdb.design.rows import QueueCount
from kombu_couchdb.queues import waiting

#: The shape of a row of `waiting`, grouped by queue and rank.
_COUNT = members(key=exactly(anything, number), value=number)


def note_at_end(context: click.Context) -> None:
    """Let the command `celery migrate`, which runs in `context`, tell at its end how many messages it has left."""
    context.call_on_close(lambda: _note(context))


def _note(context: click.Context) -> None:
    with Connection(context.params['source']) as source:
        if source.transport.driver_type == 'couchdb' and (count := _scheduled(source.transport.couchdb)):
            context.obj.error(
                f'{source.transport.address.url} keeps {count:,} scheduled message{"s" if count > 1 else ""}: only '
                f'messages that are due are moved; let workers consume there until the others have run'
            )


def _scheduled(client: Client) -> int:
    """Return the number of messages in all queues that are due later; two requests."""
    counts = map(QueueCount.of, client.view(design.NAME, 'waiting', _COUNT, group_level=2))
    queues = [count.queue for count in counts if count.rank == design.PLANNED and count.queue is not None]
    return waiting.count(client, [design.planned_rows(queue, client.clock.now()) for queue in queues])
