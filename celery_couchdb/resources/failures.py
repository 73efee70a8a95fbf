"""The resources of failures and of groups of failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from kombu_couchdb.admin.claimants import Claimants
from kombu_couchdb.admin.listing import workers_of
from kombu_couchdb.couchdb.client import Document
from kombu_couchdb.documents import dead_letter, workitem
from kombu_couchdb.documents.body import body_stub
from kombu_couchdb.values import is_number, is_whole

from ..failures import Failure, FailureGroup, Failures
from ..jobs import Jobs, Unreadable
from .columns import NO_VALUE, Cell, Column, Row, Tone, count_cell, format_ago
from .resource import Resource

#: More retries are no number of retries.
_MAX_RETRIES = 10**9

#: Shown in place of a body that would need a request of its own.
_ATTACHED = 'the body is an attachment, which "show" reads'


def failure_resource(
    failures: Failures, now: float, *, arguments: bool = False, tries: bool = False
) -> Resource[Failure]:
    """Return the resource of failures, with columns for their `arguments`, and for worker and `tries`, on wish.

    `now` is the server's time.
    """
    error = Column('ERROR', 'error', min_width=15)
    when = Column('WHEN', 'date', partial(_when, now=now), right=True)
    columns = [
        Column('ID', 'id', min_width=9),
        Column('TASK', 'task', min_width=8),
        *([Column('ARGUMENTS', 'arguments', min_width=8)] if arguments else []),
        *([error, when] if tries else []),
        Column('QUEUE', 'queue', min_width=6),
        Column('REASON', 'reason', _reason),
        *([Column('WORKER', 'worker', min_width=6), Column('TRY', None, _try, right=True)] if tries else []),
        *([] if tries else [when, error]),
    ]
    return Resource(
        partial(_describe_all, failures.jobs), columns, summarize=lambda part: [_summary(failure) for failure in part]
    )


def group_resource(now: float) -> Resource[FailureGroup]:
    """Return the resource of groups of failures; `now` is the server's time."""
    columns = [
        Column('TASK', 'task', min_width=8),
        Column('ERROR', 'error', min_width=12),
        Column('COUNT', 'count', count_cell, right=True),
        *(Column(member.upper(), member, partial(_when, now=now), right=True) for member in ('first', 'last')),
    ]
    return Resource(lambda part: [asdict(group) for group in part], columns)


def without_arguments(failure: Row) -> Row:
    """Return the description of a failure without its arguments, for those who may not see them."""
    return {**failure, **dict.fromkeys(('arguments', 'args', 'kwargs', 'body'))}


def _summary(failure: Failure) -> Row:
    error = dead_letter.error_in(failure.letter)
    return {
        'id': failure.id,
        'task': failure.task,
        'arguments': failure.arguments,
        'queue': failure.queue,
        'reason': failure.reason,
        'date': failure.date or None,
        'error': failure.error,
        'error_type': failure.error_type,
        'attempts': failure.letter.get('attempts'),
        'retries': retries if is_whole(retries := error.get('retries'), 0, _MAX_RETRIES) else None,
        'worker': worker if isinstance(worker := error.get('worker'), str) else None,
    }


def _describe_all(jobs: Jobs, part: Sequence[Failure]) -> Iterator[Row]:
    """Yield all facts about failures. Dates are seconds since the epoch. One request for all of them, or none."""
    letters = [failure.letter for failure in part]
    workers = workers_of(Claimants.of(jobs.client, letters), letters) if letters else {}
    for failure in part:
        row, consumer = _summary(failure), failure.letter.get('consumer')
        yield {
            **row,
            'traceback': failure.traceback,
            'args': None,
            'kwargs': None,
            'unreadable': None,
            **_arguments(jobs, failure.letter),
            'worker': row['worker'] or (workers.get(consumer) if isinstance(consumer, str) else None),
            'document': failure.letter['_id'],
        }


def _arguments(jobs: Jobs, letter: Document) -> Row:
    if body_stub(letter) is not None:
        return {'unreadable': _ATTACHED}
    try:
        body = jobs.decode(letter)
    except Unreadable as exc:
        return {'unreadable': str(exc)}
    is_task = workitem.task_name(letter) is not None and isinstance(body, (list, tuple)) and len(body) == 3
    return {'args': body[0], 'kwargs': body[1]} if is_task else {'body': body}


def _reason(reason: str) -> Cell:
    tone: Tone = 'warning' if reason == dead_letter.FAILED else 'bad'
    return Cell(reason, tone)


def _try(failure: Row) -> str:
    retries = failure['retries']
    number = failure['attempts'] if retries is None else retries + 1
    return f'{number:,}' if is_number(number) else NO_VALUE


def _when(date: Any, now: float) -> str:
    return format_ago(date or None, now)
