"""The page of the system: the server, its databases, the leaders of duties, and the limits in use."""

from __future__ import annotations

from starlette.responses import Response

from kombu_couchdb.admin.limit_usage import MAX_READ, limit_usage
from kombu_couchdb.admin.status import Status

from ...resources.columns import Column, Tone, count_cell, format_duration, format_size
from ...resources.databases import DATABASES, NO_BROADCASTS, databases, server_title
from ...resources.workers import LEADERS
from ..tables import Table
from ..view import Page, View

#: The maximum number of keys of limits that are shown.
_LIMIT = 100

#: A database with more tombstones, or with larger files and this many times the size of its data, needs maintenance.
_MANY_TOMBSTONES, _LARGE_BYTES, _MANY_TIMES = 2_000_000, 100_000_000, 10


def _in(seconds: float | None) -> str:
    return 'now' if seconds == 0.0 else format_duration(seconds)


_LIMITS = [
    Column('KEY', 'key'),
    Column('LIMITS', 'limits'),
    Column('SLOTS IN USE', 'slots', count_cell, right=True),
    Column('PARKED', 'parked', count_cell, right=True),
    Column('SINCE', 'age', format_duration, right=True),
    Column('NEXT START', 'next', _in, right=True),
]


def show(view: View) -> Response:
    """Show the server, the databases, the leaders and the limits."""
    found = view.snapshot().status
    limits = limit_usage(view.account.broker)
    if view.wants_json:
        members = ('server', 'database', 'broadcasts', 'results', 'leaders')
        return view.json({**{name: found[name] for name in members}, 'limits': limits})  # type: ignore[literal-required]
    workers = {one['name'] for one in found['consumers']}
    tables = [
        Table.of('Databases', DATABASES, databases(found), lambda row: row['name']),
        Table.of(
            'Duties',
            LEADERS,
            found['leaders'],
            lambda row: row['duty'],
            links={'LEADER': lambda row: view.link('/workers', worker=row['name']) if row['name'] in workers else None},
            empty='No duties: neither beat nor a worker that moves parcels is running.',
        ),
        Table.of(
            'Limits in use',
            _LIMITS,
            limits[:_LIMIT],
            lambda row: f'{row["limits"]} {row["key"]}',
            empty='No task with a concurrency limit or a rate runs or waits.',
            more=_more(len(limits)),
        ),
    ]
    return view.render('tables.html', hint=server_title(found), numbers=(), remarks=_remarks(found), tables=tables)


def _more(count: int) -> str:
    if count <= _LIMIT:
        return ''
    return f'These are the {_LIMIT} with the most parked messages, of {"at least " * (count >= MAX_READ)}{count:,}.'


def _remarks(found: Status) -> list[tuple[Tone, str]]:
    """Return sentences about what an administrator should do."""
    remarks = list[tuple[Tone, str]]()
    if not found['broadcasts']:
        remarks.append(('warning', NO_BROADCASTS))
    for database in databases(found):
        name, size, active = database['name'], database['size'] or 0, database['active'] or 0
        if (tombstones := database['tombstones'] or 0) > _MANY_TOMBSTONES:
            remarks.append(('warning', f'{name} has {tombstones:,} tombstones: run "couchdb vacuum".'))
        if size > max(_LARGE_BYTES, _MANY_TIMES * active):
            sizes = f'{format_size(size)} for {format_size(active)} of data'
            remarks.append(('warning', f'{name} needs {sizes}: CouchDB does not compact it.'))
    return remarks


page = Page('/system', 'System', show)
