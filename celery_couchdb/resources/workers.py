"""The resources of workers: consumers with their heartbeats, and the leaders of duties."""

from __future__ import annotations

from collections.abc import Callable

from .columns import Cell, Column, Row, format_duration, rate_cell


def _ago(member: str) -> Callable[[Row], Cell]:
    """Return the format of a lease: how long ago it was renewed, as this member says."""

    def cell(row: Row) -> Cell:
        text = format_duration(row[member]) + (' ago' if row[member] is not None else '')
        return Cell(text) if row['alive'] else Cell(f'overdue: {text}', 'bad')

    return cell


#: The columns of consumers.
CONSUMERS = [
    Column('CONSUMER', 'host', min_width=12),
    Column('PID', 'pid', lambda pid: str(pid or ''), right=True),
    Column('HEARTBEAT', None, _ago('heartbeat'), right=True),
    Column('RATE/S', 'rate', rate_cell, right=True),
    Column('QUEUES', 'queues', ', '.join, min_width=10),
]

#: The columns of leaders.
LEADERS = [
    Column('DUTY', 'duty', min_width=10),
    Column('LEADER', 'holder', lambda holder: holder or 'none', min_width=12),
    Column('RENEWED', None, _ago('renewed'), right=True),
]
