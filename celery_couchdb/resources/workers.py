"""The resources of workers: consumers with their heartbeats, the tasks that they run, and the leaders of duties."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kombu_couchdb.admin.status import Status
from kombu_couchdb.values import is_number

from .columns import NO_VALUE, Cell, Column, Row, count_cell, format_ago, format_duration


def _ago(member: str) -> Callable[[Row], Cell]:
    """Return the format of a lease: how long ago it was renewed, as this member says."""

    def cell(row: Row) -> Cell:
        text = format_duration(row[member]) + (' ago' if row[member] is not None else '')
        return Cell(text) if row['alive'] else Cell(f'overdue: {text}', 'bad')

    return cell


def is_busy(row: Row) -> bool:
    """Tell whether each process or thread of a worker's pool runs a task for longer than a second."""
    return bool(row['pool']) and len(row['running']) >= row['pool']['processes']


def _pool(row: Row) -> Cell:
    pool, busy = row['pool'], len(row['running'])
    if not pool:
        return Cell(f'{busy:,} busy') if busy else Cell(NO_VALUE, 'dim')
    return Cell(f'{pool["name"]}, {busy:,} of {pool["processes"]:,} busy', 'warning' if is_busy(row) else '')


def failed_cell(tasks: Row) -> Cell:
    """Return the cell for what a worker counts of its tasks: how many have failed since it began to count."""
    counts = tasks.get('counts')
    if not isinstance(counts, dict):
        return Cell(NO_VALUE, 'dim')
    numbers = [found.get('failed') for found in counts.values() if isinstance(found, dict)]
    return count_cell(sum(int(number) for number in numbers if is_number(number)), 'bad')


#: The columns of consumers.
CONSUMERS = [
    Column('WORKER', 'name', min_width=12),
    Column('PID', 'pid', lambda pid: str(pid or ''), right=True),
    Column('HEARTBEAT', None, _ago('heartbeat'), right=True),
    Column('POOL', None, _pool, min_width=12),
    Column('LEADS', 'leads', ', '.join, min_width=8),
    Column('QUEUES', 'queues', ', '.join, min_width=10),
]


def running_tasks(found: Status) -> list[Row]:
    """Return the tasks that consumers with a current lease run, the longest running first."""
    tasks: Iterable[Row] = (
        {**task, 'worker': one['name']} for one in found['consumers'] if one['alive'] for task in one['running']
    )
    return sorted(tasks, key=lambda task: task['since'])


def task_columns(now: float) -> list[Column]:
    """Return the columns for tasks that run; `now` is the server's time."""
    return [
        Column('RUNNING TASK', 'task', min_width=12),
        Column('ID', 'id', min_width=9),
        Column('QUEUE', 'queue', min_width=6),
        Column('FOR', 'since', lambda since: format_ago(since, now), right=True),
        Column('WORKER', 'worker', min_width=12),
    ]


#: The columns of leaders.
LEADERS = [
    Column('DUTY', 'duty', min_width=10),
    Column('LEADER', 'name', lambda name: name or 'none', min_width=12),
    Column('RENEWED', None, _ago('renewed'), right=True),
]
