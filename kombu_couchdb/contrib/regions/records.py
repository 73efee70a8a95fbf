"""Records for operators and programs: a list of them, and their changes; and the status of regions.

A record of a task that was given away can be found, cancelled, replayed and dropped. The status counts the records and
the returning results in the database of a region (see `region`). *Every* function raises the errors of
`kombu_couchdb.errors`. A `client` is for a region's own database of regions. Durations are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, TypedDict

from ...couchdb.client import Client, Document
from ...errors import AccessDenied, CouchDBError, DatabaseMissing
from ...values import is_number
from ..parcels.stored_parcels import Changed, Parcels
from .region import RECORD, RETURNED, order, record_id, records_to, region_id, region_of, results_to, state_of

#: The maximum number of documents of one kind that are counted for each region.
_MAX_DOCS = 10_000

#: How many records of ids that begin alike are looked for in each region.
_MAX_FOUND = 50


class Whereabouts(TypedDict):
    """Where a task is that was given to another region."""

    region: str
    #: One of `region.STATES`.
    state: str
    #: Since when, in seconds since the epoch; None if the record does not say it.
    since: float | None


class Records(Parcels):
    """The records in the database of a region, or only those of tasks for `to`. A record is named by its task."""

    noun = 'task'
    plural = 'tasks that this region gave to others'
    missing = 'no task {!r} was given to another region, or it has ended'
    states: ClassVar = {
        'sent': 'published',
        'delayed': 'published',
        'there': 'taken',
        'withdrawn': 'withdrawn',
        'refused': 'failed',
    }
    columns = ('region',)
    of_refused = Parcels.of_refused | {'state', 'taken', 'by', 'told', 'delayed', 'run_in', 'cancelled', 'terminate'}

    def __init__(self, client: Client, to: str = '') -> None:
        super().__init__(client)
        self.prefix = records_to(to) if to else RECORD

    def state_of(self, doc: Mapping[str, Any]) -> str:
        state = state_of(doc)
        return 'delayed' if 'delayed' in doc and state in ('sent', 'withdrawn') else state

    def name_of(self, doc: Mapping[str, Any]) -> str:
        return task_id if isinstance(task_id := doc.get('id'), str) else str(doc['_id'])

    def note(self, doc: Mapping[str, Any]) -> str:
        """Return why a task was refused or is delayed, and what will happen to it."""
        state, parts = self.state_of(doc), [super().note(doc)]
        if state == 'delayed':
            parts.append(str(doc['delayed']))
        if 'cancelled' in doc:
            parts.append('cancelled')
        if state_of(doc) == 'withdrawn':
            parts.append(f'runs in {doc.get("run_in")}')
        elif state in ('sent', 'delayed') and 'fallback' in doc:
            parts.append(f'runs in {doc["fallback"]} if it is not taken in time')
        return '; '.join(filter(None, parts))

    def describe(self, doc: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().describe(doc), 'region': region_of(doc['_id'])}

    def regions(self) -> Iterator[str]:
        """Return the regions for which there are records, also those that are not in the option `regions` any more."""
        return addressees(self.client, RECORD)

    def facts(self) -> Iterator[Document]:
        """Yield the members of all records that tell their states, since when, and why."""
        members = ('status', 'state', 'delayed', 'reason', *{*self.states.values()})
        return self._selected({}, members)

    def ids(self, *states: str) -> Iterator[str]:
        by_state: dict[str, list[str]] = {state: [] for state in self.states}
        for doc in self.facts():
            by_state[self.state_of(doc)].append(doc['_id'])
        return (doc_id for state, ids in by_state.items() if state in states for doc_id in ids)

    def find(self, start: str) -> list[Document]:
        """Return the records of the task `start`, or of those whose ids begin so; or that with this document id."""
        if start.startswith(RECORD):
            return list(self.read([start]))
        found = self._found(start)
        return [doc for doc in found if doc.get('id') == start] or self._found(start, begins=True)

    def _found(self, task_id: str, *, begins: bool = False) -> list[Document]:
        starts = [record_id(name, task_id)[: -1 if begins else None] for name in self.regions()]
        return list(self.read(row['id'] for each in starts for row in self.client.id_range(each, limit=_MAX_FOUND)))

    def cancel(self, docs: Sequence[Document], *, terminate: bool = False) -> Changed:
        """Ask for the end of tasks that were given away. With `terminate`, a task that runs is ended, too.

        A worker of this region or of the other one does the rest. Then the record is gone, and the result is `REVOKED`.
        """
        now, ending = self.client.clock.now(), {'terminate': True} if terminate else {}

        def cancelled(doc: Document) -> Document | str:
            state, name = state_of(doc), region_of(doc['_id'])
            if state == 'withdrawn':
                return f'it does not run in region {name} any more, but in {doc.get("run_in")}'
            if state == 'refused':
                return f'region {name} has refused it, so it does not run'
            return {'cancelled': now, **doc, **ending}

        return self.change(docs, cancelled)


def of_task(client: Client, task_id: str) -> list[Document]:
    """Return the records of a task: one for each message that was sent."""
    return [doc for doc in Records(client).find(task_id) if doc.get('id') == task_id]


def where(client: Client, task_id: str) -> Whereabouts | None:
    """Return where a task is that was given to another region and has not ended; None for any other task."""
    records = Records(client)
    found = [(records.describe(doc)['since'], doc) for doc in of_task(client, task_id)]
    since, doc = max(found, key=lambda pair: pair[0] or 0.0, default=(None, None))
    return {'region': region_of(doc['_id']), 'state': state_of(doc), 'since': since} if doc else None


def cancel(client: Client, task_id: str, *, to: str = '', terminate: bool = False) -> Changed:
    """Ask for the end of a task in another region, see `Records.cancel`.

    A later step of a chain has no record here. With `to`, the region where it runs or will run is asked.
    """
    docs = of_task(client, task_id) or ([order(to, task_id, 'cancel', client.clock.now())] if to else [])
    return Records(client).cancel(docs, terminate=terminate)


# -- the status of regions


class Tally(TypedDict):
    """A number of documents, the age of the oldest one that has a date, and why one of them waits or was refused."""

    count: int
    oldest: float | None
    reason: str | None


class Direction(TypedDict, total=False):
    """What the database of the region `source` has for the region `target`."""

    source: str
    target: str
    #: By state, see `Records`: the tasks that it gave to the target; and the `results` that return there.
    numbers: dict[str, Tally]
    #: Why the leader of the source cannot read the database of the target; None if it can.
    error: str | None
    #: The duration of a request.
    response: float
    #: Why the database of the source cannot be read from here, and what to do. The three members above are left out.
    unreadable: str


def addressees(client: Client, kind: str) -> Iterator[str]:
    """Yield the regions for which there are documents of a kind, `RECORD` or `RETURNED`."""
    start = kind
    while rows := client.id_range(start, to=kind, limit=1):
        yield (name := region_of(rows[0]['id']))
        start = f'{kind}{name};'  # the character after the colon


def outgoing(regions: Client, own: str, others: Collection[str]) -> list[Direction]:
    """Return what the database of the region `own` has for the others, also for removed or renamed ones.

    `others` are those in the option `regions`. *Raises* the errors of `Client`.
    """
    names = {*others, *addressees(regions, RECORD), *addressees(regions, RETURNED)} - {own}
    found = [direction(regions, own, name) for name in sorted(names)]
    for way in found:
        if way['target'] not in others:
            way['error'] = 'it is not in the transport option regions'
    return found


def direction(client: Client, source: str, target: str) -> Direction:
    """Return what the database of the region `source`, that of `client`, has for `target`; *raises* the same."""
    began = time.monotonic()
    errors = (client.get_or_none(region_id(source)) or {}).get('errors')
    response, now = time.monotonic() - began, client.clock.now()
    records = Records(client, target)
    by_state: dict[str, list[Document]] = {state: [] for state in records.states}
    for doc in islice(records.facts(), _MAX_DOCS):
        by_state[records.state_of(doc)].append(doc)
    by_state['results'] = client.select({}, prefix=results_to(target), limit=_MAX_DOCS, fields=['date'])
    return {
        'source': source,
        'target': target,
        'numbers': {state: _tally(docs, records.states.get(state, 'date'), now) for state, docs in by_state.items()},
        'error': str(errors[target]) if isinstance(errors, dict) and target in errors else None,
        'response': response,
    }


def _tally(docs: Collection[Mapping[str, Any]], date: str, now: float) -> Tally:
    dates = [found for doc in docs if is_number(found := doc.get(date))]
    reason = next((str(why) for doc in docs if (why := doc.get('delayed') or doc.get('reason'))), None)
    return {'count': len(docs), 'oldest': max(0.0, now - min(dates)) if dates else None, 'reason': reason}


def unreadable(name: str, client: Client, error: CouchDBError) -> str:
    """Return in words why the database of the region `name`, that of `client`, cannot be read, and what to do."""
    if isinstance(error, DatabaseMissing):
        return f'region {name} is not set up yet: run "couchdb regions setup" there ({error})'
    if not isinstance(error, AccessDenied):
        return f'region {name} does not respond to this machine; the workers must reach it ({error})'
    if 'not allowed to access' not in str(error):
        return f'region {name} cannot be read: create its user there, or correct its URL in regions ({error})'
    member = f' --member {client.user}' if client.user else ''
    return f'region {name} cannot be read yet: run "couchdb regions setup{member}" there ({without_remedy(error)})'


def without_remedy(error: CouchDBError) -> str:
    """Return the text of an error without the advice to run "couchdb setup", which is not meant for other regions."""
    return str(error).partition('; let an administrator run ')[0]
