"""The page of queues: how many messages wait, run and failed, and what one does about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from starlette.responses import Response

from kombu_couchdb.admin import queues
from kombu_couchdb.admin.status import Status
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import CouchDBError

from ...resources.columns import NO_VALUE, Column, Row, Tone, count_cell, rate_cell
from ...resources.queues import LATE_SECONDS, NO_QUEUES, queue_columns, queue_rows
from ...resources.resource import counted
from ..tables import Table
from ..view import Action, ActionOutcome, Field, Page, View


def show(view: View) -> Response:
    """Show the queues."""
    found = view.snapshot()
    rows = queue_rows(found.status)
    if view.wants_json:
        return view.json(rows)
    ready = view.history().ready()

    def last_hour(row: Row) -> list[float] | None:
        return [*ready[row['name']], row['ready']] if row['name'] in ready else None

    def in_words(row: Row) -> str:
        numbers = last_hour(row)
        return f'{row["ready"]:,} ready now, {max(numbers):,.0f} at most' if numbers else NO_VALUE

    columns = queue_columns(rows, found.date)
    others, pauses = ([one for one in columns if (one.member == 'paused') is is_pause] for is_pause in (False, True))
    table = Table.of(
        'Queues',
        [*others, *([Column('LAST HOUR', None, in_words)] if ready else [])],
        rows,
        lambda row: row['name'],
        charts={'LAST HOUR': last_hour},
        note=_note,
        remark=lambda row: ''.join(pause.cell(row).text for pause in pauses),
        selectable=view.may_act,
        empty=NO_QUEUES,
    )
    return view.render('queues.html', table=table, found=found.status, totals=_totals(found.status))


def _note(row: Row) -> tuple[Tone, str]:
    if row['paused']:
        return 'warning', 'paused'
    if row['ready'] and not row['consumers']:
        return 'bad', 'no worker'
    return ('bad', 'late') if (row['oldest'] or 0.0) > LATE_SECONDS else ('', '')


def _totals(found: Status) -> list[tuple[str, str, Tone]]:
    """Return the sums of all queues, for the numbers above the table."""
    queues = found['queues'].values()

    def total(member: str, tone: Tone = '') -> tuple[str, str, Tone]:
        cell = count_cell(sum(queue[member] for queue in queues), tone)  # type: ignore[literal-required]
        return member.capitalize(), cell.text, cell.tone

    workers = sum(consumer['alive'] for consumer in found['consumers'])
    return [
        *map(total, ('ready', 'scheduled', 'parked', 'prefetched', 'running')),
        total('dead', 'bad'),
        ('Per second', rate_cell(sum(queue['rate'] for queue in queues)).text, ''),
        ('Workers', f'{workers:,}', '' if workers else 'warning'),
    ]


def _each(act: Callable[[View, Client, str], Any], said: Callable[[str, Any], str]) -> Callable[..., ActionOutcome]:
    """Return the function of an action: `act` for each queue, and one sentence of what `said` says of each."""

    def function(view: View, targets: Sequence[str]) -> ActionOutcome:
        done, refused = list[str](), list[str]()
        for name in targets:
            try:
                done.append(said(name, act(view, view.account.broker, name)))
            except CouchDBError as exc:
                refused.append(str(exc))
        text = f'{"; ".join([*done, *refused][:10])}{" …" if len(targets) > 10 else ""}.'
        return ActionOutcome(text, 'bad' if refused else 'good')

    return function


_pause = _each(
    lambda view, client, name: queues.pause(
        client,
        name,
        by=view.session.name,
        reason=view.form.get('reason', '').strip() or None,
        refuse=bool(view.form.get('refuse')),
    ),
    lambda name, done: f'{name}: paused' if done else f'{name}: was paused already',
)
_resume = _each(
    lambda view, client, name: queues.resume(client, name),
    lambda name, done: f'{name}: resumed' if done else f'{name}: was not paused',
)
_purge = _each(
    lambda view, client, name: queues.purge(client, name),
    lambda name, count: f'{name}: {counted(count, "message")} deleted',
)
_delete = _each(
    lambda view, client, name: queues.delete(client, name),
    lambda name, count: f'{name}: deleted, with {counted(count, "message")}',
)

page = Page(
    '/queues',
    'Queues',
    show,
    noun='queue',
    actions=(
        Action(
            'pause',
            'Pause',
            _pause,
            'Pause {}?',
            'Workers stop to claim messages within a second. Tasks that they run or have received go on, and messages '
            'can be published, and wait.',
            fields=[Field('refuse', 'Refuse new messages of programs', kind='check')],
        ),
        Action('resume', 'Resume', _resume),
        Action(
            'purge',
            'Purge',
            _purge,
            'Purge {}?',
            'Its ready and scheduled messages are deleted for good. What workers hold, and dead letters, are kept.',
            tone='bad',
        ),
        Action(
            'delete',
            'Delete',
            _delete,
            'Delete {}?',
            'The bindings and the ready and scheduled messages are deleted, too. A queue that workers consume is kept.',
            tone='bad',
        ),
    ),
)
