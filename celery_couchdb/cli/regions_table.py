"""The output of `celery couchdb regions status`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from kombu_couchdb.admin.regions import Region, Remote

from .tables import Cell, Column, Row, count_cell, format_duration, format_table

__all__ = ['Found', 'is_bad', 'remarks', 'source_of', 'table']


class Found(TypedDict):
    """The state of another region."""

    name: str
    #: As the own server knows it.
    local: Region
    #: As the other region's server knows it; None if that does not respond.
    remote: Remote | None
    #: The reason for which it does not respond.
    error: str | None
    #: True if the node from which CouchDB pulls responds; None if that is unknown, or the region has one URL.
    source_responds: bool | None


def source_of(region: Region) -> str | None:
    """Return the URL of the database of regions from which CouchDB pulls, if it is known."""
    return region['replications']['regions']['source']


def is_bad(one: Found) -> bool:
    """Tell whether a region or its node does not respond, a replication is not running, or a parcel is missing."""
    remote = one['remote']
    return remote is None or remote['missing'] > 0 or one['source_responds'] is False or _is_broken(one['local'])


def _is_broken(region: Region) -> bool:
    return any(one['state'] not in (None, 'running') for one in region['replications'].values())


def table(found: Sequence[Found]) -> str:
    """Return the table of `status`, a line for each other region."""
    return format_table(_COLUMNS, found)


def _responds(remote: Remote | None) -> Cell:
    return Cell(f'{remote["response"] * 1000:.0f} ms') if remote else Cell('no', {'fg': 'red'})


def _arriving(one: Row) -> Any:
    """Return the parcels from the region, as it knows them, or else as the own server does."""
    return one['remote']['leaving'] if one['remote'] else one['local']['arrived']


_COLUMNS = [
    Column('REGION', 'name', min_width=6),
    Column('PULLS', 'local', lambda local: Cell(_pulls(local), {'fg': 'red'} if _is_broken(local) else {})),
    Column('LAG', 'remote', lambda remote: count_cell(remote and remote['pending']), right=True),
    Column('TO', 'local', lambda local: count_cell(local['leaving']['count']), right=True),
    Column('OLDEST', 'local', lambda local: format_duration(local['leaving']['oldest']), right=True),
    Column('FROM', None, lambda one: count_cell(_arriving(one)['count']), right=True),
    Column('OLDEST', None, lambda one: format_duration(_arriving(one)['oldest']), right=True),
    Column('REFUSED', 'local', lambda local: count_cell(local['refused']['count'], fg='red'), right=True),
    Column('SEEN', 'local', lambda local: format_duration(local['seen']), right=True),
    Column('RESPONDS', 'remote', _responds, right=True),
]


def _pulls(region: Region) -> str:
    states = [one['state'] or 'unknown' for one in region['replications'].values()]
    return states[0] if len(set(states)) == 1 else ', '.join(states)


def remarks(found: Sequence[Found]) -> list[str]:
    """Return sentences about what is wrong, and about what cannot be read."""
    lines = []
    for one in found:
        lines += [
            f'{one["name"]}: the replication of {"parcels" if kind == "regions" else kind} is {state["state"]} since '
            f'{state["since"]}: {state["error"]}'
            for kind, state in one['local']['replications'].items()
            if state['error']
        ]
        lines += [f'{one["name"]}: {one["error"]}'] if one['error'] else []
        if one['source_responds'] is not None:
            hint = ', which does not respond: "celery -A your_app couchdb regions nudge" chooses another node'
            used = f'{one["name"]}: CouchDB pulls from {source_of(one["local"])}'
            lines.append(used if one['source_responds'] else used + hint)
        if one['remote'] and (missing := one['remote']['missing']):
            lines.append(f'{one["name"]}: {missing:,} parcels from there are not here')
    states = [state['state'] for one in found for state in one['local']['replications'].values()]
    if 'missing' in states:
        lines.append('a replication is missing: run "celery -A your_app couchdb regions setup"')
    if None in states:
        lines.append('the states of replications can be read by administrators of CouchDB only: name one with --admin')
    return lines
