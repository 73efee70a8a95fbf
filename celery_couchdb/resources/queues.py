"""The resource of queues: their messages by state, and their pauses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from kombu_couchdb.admin.queues import Paused
from kombu_couchdb.admin.status import Status
from kombu_couchdb.values import enumerated

from .columns import NO_VALUE, Cell, Column, Row, count_cell, format_duration, rate_cell
from .workers import is_busy

#: Shown in place of a table of queues.
NO_QUEUES = 'No queues yet: they are declared by the first worker, or with the first message.'

_PAUSED = 'Paused'

#: The most busy workers that are named.
_MAX_NAMED = 5

#: Mark the oldest ready message of a queue if it has waited longer than this.
LATE_SECONDS = 300.0


def queue_rows(found: Status) -> list[Row]:
    """Return the queues of a status as rows of a table, and as objects for JSON."""
    workers = defaultdict[str, list[Row]](list)
    for one in found['consumers']:
        for name in set(one['queues']) if one['alive'] else ():
            workers[name].append(one)
    return [
        {
            'name': name,
            **queue,
            'consumers': len(workers[name]),
            'busy': [one['name'] for one in workers[name] if is_busy(one)],
        }
        for name, queue in found['queues'].items()
    ]


def queue_warnings(queues: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """Return what is wrong with queues: sentences, each with the names of the queues."""
    paused = [row['name'] for row in queues if row['paused']]
    idle = [row['name'] for row in queues if row['ready'] and not row['consumers'] and not row['paused']]
    return [(text, names) for text, names in ((_PAUSED, paused), ('No worker consumes', idle)) if names]


def queue_remarks(queues: Sequence[Row], now: float) -> list[str]:
    """Return the same as lines below a table, with the dates and the reasons of pauses."""
    pauses = [f'{row["name"]} is paused: {pause_text(row["paused"], now)}' for row in queues if row['paused']]
    others = [f'{text}: {", ".join(names)}' for text, names in queue_warnings(queues) if text != _PAUSED]
    return [*pauses, *others, *(f'{row["name"]}: {text}' for row in queues if (text := busy_text(row)))]


def queue_columns(queues: Sequence[Row]) -> list[Column]:
    """Return the columns for queues. PARKED is there only if a message is parked: limits are rare."""
    columns = [
        Column('QUEUE', 'name', min_width=6),
        Column('READY', 'ready', count_cell, right=True),
        Column('SCHEDULED', 'scheduled', count_cell, right=True),
        Column('PARKED', 'parked', count_cell, right=True),
        Column('PREFETCHED', 'prefetched', count_cell, right=True),
        Column('RUNNING', 'running', count_cell, right=True),
        Column('DEAD', 'dead', partial(count_cell, tone='bad'), right=True),
        Column('OLDEST', None, _oldest, right=True),
        Column('RATE/S', 'rate', rate_cell, right=True),
        Column('CONSUMERS', 'consumers', count_cell, right=True),
    ]
    return [column for column in columns if column.member != 'parked' or any(row['parked'] for row in queues)]


def _oldest(row: Row) -> Cell:
    seconds = row['oldest']
    if seconds is None:
        return Cell('…' if row['ready'] else NO_VALUE, 'dim')  # it was not read yet
    return Cell(format_duration(seconds), 'warning' if seconds > LATE_SECONDS else '')


def busy_text(row: Row) -> str:
    """Return why the ready messages of a queue wait, if all of its workers are busy; otherwise ''."""
    is_cause = row['ready'] and not row['paused'] and row['busy'] and len(row['busy']) == row['consumers']
    return f'all of its workers are busy: {enumerated(row["busy"], _MAX_NAMED)}' if is_cause else ''


def pause_text(paused: Paused, now: float) -> str:
    """Return since when a queue is paused, by whom and why; `now` is in seconds since the epoch."""
    text = 'paused' if paused['date'] is None else f'{format_duration(now - paused["date"])} ago'
    text += f' by {paused["by"]}' if paused['by'] else ''
    text += ', takes no new messages' if paused['refuse'] else ''
    return f'{text}: {paused["reason"]}' if paused['reason'] else text
