"""The page of queues: how many messages wait, run and failed, and what one does about it."""

from __future__ import annotations

from starlette.responses import Response

from kombu_couchdb.admin.status import Status

from ...resources.columns import NO_VALUE, Column, Row, Tone, count_cell, rate_cell
from ...resources.queue_actions import QUEUES
from ...resources.queues import LATE_SECONDS, NO_QUEUES, busy_text, pause_text, queue_columns, queue_rows
from ..selections import actions_of
from ..tables import Table
from ..view import Page, View


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

    table = Table.of(
        'Queues',
        [*queue_columns(rows), *([Column('LAST HOUR', None, in_words)] if ready else [])],
        rows,
        lambda row: row['name'],
        links={
            'QUEUE': lambda row: view.link('/jobs', queue=row['name']),
            'DEAD': lambda row: view.link('/failures', queue=row['name']) if row['dead'] else None,
            'CONSUMERS': lambda row: view.link('/workers') if row['consumers'] else None,
        },
        charts={'LAST HOUR': last_hour},
        note=_note,
        remark=lambda row: pause_text(row['paused'], found.date) if row['paused'] else busy_text(row),
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


page = Page('/queues', 'Queues', show, noun='queue', actions=actions_of(QUEUES, lambda view: view.account.broker))
