"""Jobs as people see them: a line in a table, a page, or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from kombu_couchdb.couchdb.client import Document
from kombu_couchdb.documents import workitem
from kombu_couchdb.documents.ids import CONSUMER

from ..jobs import Jobs, Unreadable
from .tables import NONE, Cell, Column, age, json_line, printable, table

__all__ = ['described', 'letters_table', 'listed', 'page', 'shown']

#: How many characters of the arguments stand in a page of their own line before they are cut.
_LONG = 2000

_NOTES = {'behind': ' (waits behind one that runs)', 'gone': ' (it has expired)'}

_COLOURS = {'running': 'green', 'pending': None, 'scheduled': 'cyan', 'dead': 'red', 'gone': None}


def described(jobs: Jobs, doc: Document) -> dict[str, Any]:
    """Return what is known of a job, fit for JSON; dates are seconds since the epoch."""
    message = doc.get('message')
    headers = message.get('headers') if isinstance(message, dict) else None
    try:
        body, unreadable = jobs.decode(doc), None
    except Unreadable as exc:
        body, unreadable = None, str(exc)
    task = isinstance(body, (list, tuple)) and len(body) == 3
    return {
        'id': workitem.task_id(doc),
        'document': doc['_id'],
        'task': workitem.task_name(doc),
        'queue': doc.get('queue'),
        'state': workitem.state(doc, jobs.client.clock.now()),
        'behind': bool(doc.get('behind')),
        'priority': doc.get('priority'),
        'published': doc.get('published'),
        'due': doc.get('date'),
        'expires': doc.get('expires'),
        'attempts': doc.get('attempts'),
        'consumer': workitem.claimant(doc) or doc.get('consumer'),
        'claimed': doc['claimed'].get('date') if workitem.claimant(doc) else None,
        'job_key': doc.get('key'),
        'reason': doc.get('reason'),
        'failed': doc.get('failed'),
        'headers': headers,
        'args': body[0] if task else None,
        'kwargs': body[1] if task else None,
        'body': None if task else body,
        'unreadable': unreadable,
    }


def shown(jobs: Jobs, docs: Sequence[Document], as_json: bool) -> str:
    """Return all that is known of jobs, a JSON object a line or a page each."""
    found = [described(jobs, doc) for doc in docs]
    return (
        '\n'.join(map(json_line, found))
        if as_json
        else '\n\n'.join(page(job, jobs.client.clock.now()) for job in found)
    )


def page(job: Mapping[str, Any], now: float) -> str:
    """Return all that is known of a job, one thing a line."""
    lines = []
    for name in (
        'id',
        'task',
        'queue',
        'state',
        'job_key',
        'priority',
        'published',
        'due',
        'expires',
        'attempts',
        'consumer',
        'claimed',
        'reason',
        'failed',
        'args',
        'kwargs',
        'body',
        'unreadable',
        'document',
    ):
        value = job[name]
        if value is None or (name == 'document' and value == job['id']):
            continue
        if name == 'consumer':
            value = str(value).removeprefix(CONSUMER)
        if name in ('published', 'due', 'expires', 'claimed', 'failed'):
            text = _moment(value, now)
        elif name in ('args', 'kwargs', 'body'):
            text = json_line(value)
        else:
            text = str(value) + (_NOTES.get('behind' if job['behind'] else value, '') if name == 'state' else '')
        text = printable(text)
        lines.append(f'{name:<10} {text if len(text) <= _LONG else text[:_LONG] + "… (see --json)"}')
    return '\n'.join(lines)


def _moment(value: Any, now: float) -> str:
    if not isinstance(value, (int, float)):
        return str(value)
    try:
        date = datetime.fromtimestamp(value, timezone.utc).isoformat(sep=' ', timespec='seconds')
    except (ValueError, OverflowError, OSError):
        return str(value)
    return f'{date} ({age(now - value)} ago)' if value <= now else f'{date} (in {age(value - now)})'


def listed(docs: Sequence[Document], now: float, room: int) -> str:
    """Return jobs as a table."""
    rows = []
    for doc in docs:
        state = workitem.state(doc, now)
        rows.append(
            [
                workitem.task_id(doc) or doc['_id'],
                workitem.task_name(doc) or NONE,
                str(doc.get('queue')),
                Cell(state, {'fg': _COLOURS[state]} if _COLOURS[state] else {}),
                _when(doc, state, now),
                _attempts(doc),
            ]
        )
    return table(
        [
            Column('ID', least=36),
            Column('TASK', least=8),
            Column('QUEUE', least=6),
            Column('STATE'),
            Column('WHEN', right=True),
            Column('TRY', right=True),
        ],
        rows,
        room,
    )


def letters_table(docs: Sequence[Document], now: float, room: int) -> str:
    """Return dead letters as a table."""
    rows = [
        [
            workitem.task_id(doc) or doc['_id'],
            workitem.task_name(doc) or NONE,
            str(doc.get('queue')),
            _ago(doc.get('failed'), now),
            _attempts(doc),
            Cell(str(doc.get('reason')), {'fg': 'red'}),
        ]
        for doc in docs
    ]
    return table(
        [
            Column('ID', least=36),
            Column('TASK', least=6),
            Column('QUEUE', least=6),
            Column('AGE', right=True),
            Column('TRY', right=True),
            Column('REASON', least=10),
        ],
        rows,
        room,
    )


def _attempts(doc: Document) -> str:
    return str(doc.get('attempts', NONE))


def _when(doc: Document, state: str, now: float) -> str:
    if state == 'scheduled':
        return f'in {age(doc["date"] - now)}'
    if state == 'running':
        return _ago(doc['claimed'].get('date'), now)
    return _ago(doc.get('failed') if state == 'dead' else workitem.ready_since(doc), now)


def _ago(date: Any, now: float) -> str:
    return age(now - date) if isinstance(date, (int, float)) else NONE
