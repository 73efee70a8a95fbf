"""Checks for probes: the databases are set up, a worker's heartbeat is fresh, a queue is not too long or too old.

Each check returns findings. A failed check is a finding, too, not an exception; exceptions are requests that failed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from ..couchdb.client import Client
from ..couchdb.shapes import equal, exactly, maybe, members, revision
from ..documents.ids import QUEUE
from ..errors import AccessDenied, DatabaseMissing
from ..queues.broadcasts_database import broadcasts_of
from .queues import paused
from .status import backlog, consumers


class Finding(NamedTuple):
    """What one check found, in words."""

    passed: bool
    text: str


def check_database(client: Client, designs: Sequence[str]) -> Iterator[Finding]:
    """Check that a database and its design documents with these names exist; one request."""
    try:
        exists = not _missing(client, [f'_design/{name}' for name in designs])
    except DatabaseMissing:
        exists = False
    url = client.address.url
    if exists:
        yield Finding(True, f'{url} is set up')
    else:
        yield Finding(False, f'{url} is not set up; run "celery -A your_app couchdb setup"')


def check_broadcasts(broker: Client) -> Iterator[Finding]:
    """Report a broadcasts database that is missing or locked, which is no failure; one request."""
    client = broadcasts_of(broker)
    try:
        client.info()
    except (DatabaseMissing, AccessDenied) as exc:
        yield Finding(True, f'every consumer follows the database of the broker, because {exc}')


def check_worker(client: Client, name: str, queue: str | None, host: str) -> Iterator[Finding]:
    """Check that a worker's consumers have a current lease; one request.

    `queue` is the worker's queue for remote control, by which its process is found. None if workers have none: then any
    process on the machine `host` counts. `host` is '' if the machine is unknown.
    """
    known = consumers(client, f'{host}:' if host else '')
    processes = {(one['host'], one['pid']) for one in known if queue is None or queue in one['queues']}
    own = [one for one in known if (one['host'], one['pid']) in processes]
    # A killed worker leaves consumers behind. The one that replaced it may even have the same process id, as in a
    # container, but then it consumes the same queues.
    current: dict[tuple[str, int | None], dict[tuple[str, ...], bool]] = defaultdict(dict)
    for one in own:
        of_process, queues = current[one['host'], one['pid']], tuple(one['queues'])
        of_process[queues] = one['alive'] or of_process.get(queues, False)
    is_alive = any(all(of_process.values()) for of_process in current.values())
    age = min((one['heartbeat'] or 0.0 for one in own if one['alive'] is is_alive), default=0.0)
    if not own:
        yield Finding(False, f'worker {name} has no consumer: it is not running, or has another name')
    elif is_alive:
        yield Finding(True, f'worker {name} wrote a heartbeat {age:.0f} s ago')
    else:
        yield Finding(False, f'worker {name} is overdue: its last heartbeat is {age:.0f} s old')


def check_backlog(
    client: Client, queues: Collection[str], max_ready: int | None, max_oldest: float | None
) -> Iterator[Finding]:
    """Check the number of ready messages in each queue, and the age of the oldest in seconds; at most three requests.

    None is no limit, and a paused queue may exceed it. Without `queues`, all queues are checked. One more request reads
    the pauses if a limit is exceeded, and one checks that those of `queues` exist that have no messages.
    """
    found = {name: one for name, one in backlog(client).items() if not queues or name in queues}
    ready = sum(one['ready'] for one in found.values())
    yield Finding(True, f'{ready:,} ready {"message" if ready == 1 else "messages"}')
    over: dict[str, list[Finding]] = defaultdict(list)
    for name, one in sorted(found.items()):
        if max_ready is not None and one['ready'] > max_ready:
            over[name].append(
                Finding(False, f'queue {name} has {one["ready"]:,} ready messages, more than {max_ready:,}')
            )
        if max_oldest is not None and (one['oldest'] or 0.0) > max_oldest:
            over[name].append(
                Finding(False, f'queue {name} has a message that has been due for {one["oldest"]:,.0f} s')
            )
    pauses = paused(client) if over else {}
    for name, findings in over.items():
        yield from [Finding(True, f'queue {name} is paused')] if name in pauses else findings
    empty = [QUEUE + name for name in queues if name not in found]
    for doc_id in _missing(client, empty) if empty else ():
        name = doc_id.removeprefix(QUEUE)
        yield Finding(False, f'queue {name} does not exist; start its first worker, or correct --queue')


def _missing(client: Client, ids: Sequence[str]) -> list[str]:
    """Return those of these ids that have no document; one request, without the documents."""
    row = [members(key=equal(doc_id), value=maybe(members(rev=revision))) for doc_id in ids]
    rows = client.request(
        'POST', '/_all_docs', body={'keys': list(ids)}, repeat=True, shape=members(rows=exactly(*row))
    )['rows']
    return [row['key'] for row in rows if not row.get('value') or row['value'].get('deleted')]
