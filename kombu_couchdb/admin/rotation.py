"""The rotation: moves a database to a new one, without its old tombstones, while workers and publishers follow.

Where a service does not offer `_purge`, or lets nobody use it, only a new database is without tombstones. The rotation
copies all leaf revisions with their histories and attachments, as replication does, so that the revisions that workers
hold stay valid. It leaves out the tombstones that a vacuum would purge, see `admin.vacuum`.

1. *Copy.* Everything is copied, then what has changed meanwhile, until that is little; the indexes are built.
2. *Close.* A design document refuses all writes. It does so until a date first, so that a killed rotation leaves a
   database that opens by itself. When all shards refuse, and what they had accepted before is stored, the rest is
   copied. Then the design document refuses for ever.
3. *Switch.* The location says where the database is now, see `couchdb.location`. Every refused write goes there.
4. *Delete.* The former database is deleted: who only reads learns of the new one by that.

Before the switch nobody uses the new database, and after the closing nobody changes the former one. So there is no
moment at which both are written, whatever is killed, and however late a process learns of the move. A killed rotation
is finished by the next one. Of two at the same time, the one that has changed the location last goes on: the other one
cannot switch any more.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any
from zlib import crc32

from ..couchdb.bounds import Bounds
from ..couchdb.client import Client, Document, chunks, path_of
from ..couchdb.conflicts import SYNC
from ..couchdb.failures import CLOSED, is_closed
from ..couchdb.location import DOCUMENT, location_name, moved_name, number_of
from ..couchdb.pacing import Kind, TooManyUnits
from ..couchdb.shapes import DONE, items, maybe, members, number, text
from ..errors import NOBODY, AccessDenied, Conflict, CouchDBError, DatabaseMissing, NotOffered
from . import vacuum
from .cluster import Cluster, Indexes, Refused
from .vacuum import INFO, MARKS, Marks, Moving, Progress, Tombstones, pages, wait_for_mark

__all__ = ['Report', 'rotate']

#: The design document that closes a database. `until` is when it opens by itself, in seconds since the epoch; once that
#: is missing, `to` names the new database, which has everything up to the update sequence `since`.
_CLOSING = '_design/celery-closed'

#: The function that refuses writes. CouchDB's own `Date` is the only clock in it.
_REFUSE = f"""function () {{
  if (Date.now() < %s) {{
    throw({{forbidden: '{CLOSED}'}});
  }}
}}"""

#: How long a database is closed at the most before the closing is made permanent, and by how much the clocks of the
#: nodes and of this process may differ; seconds.
_CLOSED_SECONDS, _CLOCK_SECONDS = 20.0, 3.0

#: How long writes that a shard had accepted before it was closed may take until they are stored, in seconds. In a
#: cluster the nodes replicate to each other meanwhile, see `SYNC`.
_SETTLE_SECONDS = 1.0

#: How long the former database stays, so that most processes learn of the move from a refused write, in seconds.
_LINGER_SECONDS = 1.0

#: A pass over the changes that has copied at most so many documents is short, or as many as a service with limits takes
#: in so many requests; and the most passes before the closing.
_SHORT_PASS, _SHORT_REQUESTS, _MAX_PASSES = 200, 8, 20

#: How often a closing is tried.
_MAX_CLOSINGS = 3

#: The number of documents that are copied in one request, and of probes for each shard. CouchDB finds the shard of a
#: document by the CRC-32 of its id, as `mem3_hash` in its source does.
_COPY_DOCS, _PROBES = 200, 2

#: The beginning of the ids of probes. A probe is a tombstone, and is not copied.
_PROBE = 'celery-probe:'

_CREATED = members(cluster=maybe(members(q=number)))
_REFUSALS = items(members(id=text))


@dataclass
class Report(vacuum.Report):
    """The results of a rotation, with those that it has in common with a vacuum."""

    #: The names of the databases before and after it.
    former: str = ''
    present: str = ''
    #: The number of revisions that were copied, those of young tombstones included.
    copied: int = 0
    #: For how long the database took no writes, in seconds.
    closed: float = 0.0
    #: Whether an earlier rotation, which was stopped, was finished, and nothing else was done.
    finished: bool = False


def rotate(client: Client, progress: Progress, *, age: float, wait: bool = True, moving: Moving = frozenset) -> Report:
    """Move a database to a new one without the tombstones older than `age` seconds. Report by `progress`.

    `age`, `wait` and `moving` are those of `vacuum`. The user must be allowed to create and delete databases. An
    earlier rotation that was killed is finished, or, before its switch, begun anew.

    *Raises* `AccessDenied` if the user lacks a right, and `Refused` if the server is the embedded one, a node is down,
    or another rotation runs.
    """
    return _Rotation(client, progress, age, moving).run(wait)


class _Rotation:
    def __init__(self, client: Client, progress: Progress, age: float, moving: Moving) -> None:
        self._client, self._progress, self._age, self._moving = client, progress, age, moving
        self._given = client.address.database
        self._cluster = Cluster(client)
        self._location = client.beside(location_name(self._given), moves=False)
        #: The location document, as this process has read or written it last.
        self._place: Document = {'_id': DOCUMENT, 'database': self._given}
        #: The update sequence of the former database up to which the new one has everything.
        self._since: Any = 0

    def run(self, wait: bool) -> Report:
        began = time.monotonic()
        self._check()
        with suppress(DatabaseMissing):  # it was never moved
            self._place = self._location.get_or_none(DOCUMENT) or self._place
        if former := self._place.get('former'):
            self._former = self._client.beside(former, moves=False)
            self._new = self._client.beside(self._place['database'], moves=False)
            self._begin_report(finished=True)
            self._finish()
        else:
            self._former = self._client.beside(self._place['database'], moves=False)
            self._move(wait)
        report = self._report
        report.tombstones_after, report.data_after, report.indexes_after = _sizes(self._new)
        report.seconds = time.monotonic() - began
        return report

    def _move(self, wait: bool) -> None:
        former = self._former.address.database
        closing = self._former.get_or_none(_CLOSING) or {}
        earlier = str(self._place.get('target', ''))
        resumes = bool(earlier) and closing.get('to') == earlier
        mark = None if resumes else self._mark(wait)
        if mark is None and not resumes:
            self._new = self._former
            self._begin_report(marked=False)
            return
        number = max(number_of(self._given, name) or 0 for name in (former, earlier or former))
        target = earlier if resumes else moved_name(self._given, number + 1)
        self._new = self._client.beside(target, moves=False)
        self._begin_report()
        self._prepare_location()
        self._put_location(database=former, target=target)
        if resumes:
            self._since = closing['since']
        else:
            for name in {earlier, target} - {''}:  # a half copy may have documents that were deleted since
                with suppress(DatabaseMissing):
                    self._client.beside(name, moves=False).delete()
            self._create()
            self._copy_all(mark)
        self._close(resumes)
        self._put_location(database=target, former=former)
        self._client.http.locate()
        self._report.closed = time.monotonic() - self._closed_at
        self._finish()

    def _begin_report(self, **members: Any) -> None:
        former, present = self._former.address.database, self._new.address.database
        try:
            sizes = _sizes(self._former)
        except DatabaseMissing:  # an earlier rotation has deleted it
            sizes = 0, 0, 0
        self._report = Report(self._given, *sizes, former=former, present=present, **members)

    # -- before

    def _check(self) -> None:
        if 'couchdb' not in self._client.welcome():
            raise Refused(
                f'{self._client.address.server} is the embedded server, which does not enforce validate_doc_update: '
                f'only Apache CouchDB can close a database while it is moved'
            )
        with suppress(AccessDenied, NotOffered):  # a service that does not tell it keeps its nodes up
            self._cluster.nodes()

    def _prepare_location(self) -> None:
        """Create the database that says where the database is, for the same users."""
        try:
            self._location.create()
        except AccessDenied as exc:
            if 'server admin' not in str(exc):
                raise  # the password is wrong
            raise AccessDenied(
                f'{self._client.address.url}: {self._client.who or NOBODY} may not create databases, as this '
                f'needs: name an administrator of CouchDB with --admin'
            ) from exc
        _copy_security(self._former, self._location)

    def _put_location(self, **members: str) -> None:
        """Write the location document over the revision that this process knows: another rotation may have begun."""
        doc: Document = {'_id': DOCUMENT, **members}
        if '_rev' in self._place:
            doc['_rev'] = self._place['_rev']
        with self._alone():
            self._place = {**doc, '_rev': self._location.put(doc)}

    @contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            yield
        except (Conflict, DatabaseMissing) as exc:
            raise Refused(f'{self._client.address.url}: another rotation of this database runs; let it end') from exc

    def _mark(self, wait: bool) -> Any | None:
        marks = Marks(self._former)
        with self._alone():
            marks.add(self._age)
        if wait:
            wait_for_mark(marks, self._age, self._progress)
        return marks.latest(self._age)

    # -- copy

    def _create(self) -> None:
        copies = self._former.info(_CREATED).get('cluster') or {}
        self._new.request('PUT', '', {name: copies[name] for name in ('q', 'n') if name in copies}, shape=DONE)
        _copy_security(self._former, self._new)
        with suppress(NotOffered):
            limit = self._former.request('GET', '/_revs_limit', repeat=True, shape=number)
            self._new.request('PUT', '/_revs_limit', body=limit, shape=DONE)

    def _copy_all(self, mark: Any) -> None:
        total = int(self._former.info(INFO)['doc_count'])
        tombstones = Tombstones(Cluster(self._former), Marks(self._former))
        for rows, old, last in tombstones.read(mark, self._moving()):
            left = {tombstone.id for tombstone in old}
            self._copy([row['id'] for row in rows if row['id'] not in left])
            self._since = last
            self._progress('copy', min(self._report.copied, total), total)
        for _ in range(_MAX_PASSES):
            self._copy_design_documents()
            self._progress('index', 0, 1)
            Indexes(Cluster(self._new)).process_latest()
            self._progress('index', 1, 1)
            if self._catch_up() <= min(_SHORT_PASS, _SHORT_REQUESTS * self._new.pace.most(Kind.WRITE)):
                break

    def _catch_up(self) -> int:
        """Copy what has changed since the last call; return the number of documents."""
        count = 0
        for rows, last in pages(self._former, self._since):
            count += self._copy([row['id'] for row in rows])
            self._since = last
        return count

    def _copy(self, ids: Sequence[str]) -> int:
        """Copy all leaf revisions of documents, except of design documents; return the number of documents."""
        ids = [doc_id for doc_id in ids if not doc_id.startswith(('_design/', _PROBE))]
        for part in chunks(ids, _COPY_DOCS):
            self._copy_part(part)
        return len(ids)

    def _copy_design_documents(self) -> None:
        ids = [row['id'] for row in self._former.id_range('_design/')]
        self._copy_part([doc_id for doc_id in ids if doc_id not in (MARKS, _CLOSING)])

    def _copy_part(self, ids: Sequence[str]) -> None:
        leaves = [leaf for found in self._former.fetch_leaves(ids, revs=True) for leaf in self._with_attachments(found)]
        for result in self._new.copy_revisions(leaves):
            if not result.is_stored:
                raise result.exception(f'{self._new.address.url}/{result.id} was not copied')
        self._report.copied += len(leaves)

    def _with_attachments(self, leaves: list[Document]) -> list[Document]:
        """Return the leaf revisions of a document with the contents of its attachments, in a request of its own."""
        sizes = [stub.get('length', 0) for leaf in leaves for stub in leaf.get('_attachments', {}).values()]
        if not sizes:
            return leaves
        params = {'open_revs': 'all', 'revs': True, 'attachments': True}
        found, status = self._former.http.exchange(
            'GET', path_of(leaves[0]['_id']), params, repeat=True, bounds=Bounds(extra_bytes=2 * sum(sizes))
        )
        return [leaf['ok'] for leaf in self._former.decode(found, status, shape=items(members())) if 'ok' in leaf]

    # -- close

    def _close(self, is_closed: bool) -> None:
        """Close the former database for ever, unless it is, and copy the rest. If that fails before, it opens again."""
        self._closed_at = time.monotonic()
        for attempt in range(_MAX_CLOSINGS if not is_closed else 0):
            self._progress('close', attempt, _MAX_CLOSINGS)
            self._closed_at = time.monotonic()
            until = self._former.clock.now() + _CLOSED_SECONDS
            try:
                self._put_closing({'until': until}, f'{until * 1000:.0f}')
                self._settle()
                self._check()
            except BaseException:
                with suppress(CouchDBError):
                    self._put_closing({'_deleted': True})
                raise
            if is_closed := self._former.clock.now() + _CLOCK_SECONDS < until:
                break
        if not is_closed:
            raise Refused(
                f'{self._client.address.url}: the rest could not be copied in the {_CLOSED_SECONDS:g} s for which the '
                f'database takes no writes; try again when less is written to it'
            )
        self._put_closing({'to': self._new.address.database, 'since': self._since})
        self._wait_until_refused()
        while self._catch_up():  # this process was paused for so long that the database had opened meanwhile
            self._settle()
        self._progress('close', 1, 1)

    def _put_closing(self, members: Document, until: str = 'Infinity') -> None:
        """Write the design document that refuses writes `until` a time, in milliseconds since the epoch.

        Only the rotation that began last may do so: another one may have closed the database for ever, and switched.
        """
        with self._alone():
            stored = self._former.get_or_none(_CLOSING) or {}
            if self._location.get(DOCUMENT)['_rev'] != self._place['_rev']:
                raise Conflict(DOCUMENT)
            doc = {'_id': _CLOSING, 'language': 'javascript', 'validate_doc_update': _REFUSE % until, **members}
            self._former.put({**doc, **({'_rev': stored['_rev']} if stored else {})})

    def _settle(self) -> None:
        """Wait until every shard refuses writes, and what it had accepted before is stored; copy that."""
        self._wait_until_refused()
        settled = time.monotonic() + (SYNC if self._former.is_cluster() else _SETTLE_SECONDS)
        while self._catch_up() or time.monotonic() < settled:
            time.sleep(0.1)
        self._copy_design_documents()

    def _wait_until_refused(self) -> None:
        """Wait until a probe was refused by each shard."""
        shards = int((self._former.info(_CREATED).get('cluster') or {}).get('q', 1))
        deadline = time.monotonic() + _CLOSED_SECONDS
        while not self._is_refused(_probes(shards)):
            if time.monotonic() > deadline:
                raise Refused(
                    f'{self._client.address.url}: CouchDB does not enforce validate_doc_update; nothing was moved'
                )
            time.sleep(0.05)

    def _is_refused(self, ids: Sequence[str]) -> bool:
        most = self._former.pace.most(Kind.WRITE)
        return all(self._are_refused(part) for part in chunks(ids, int(min(most, len(ids)))))

    def _are_refused(self, ids: Sequence[str]) -> bool:
        body = {'docs': [{'_id': doc_id, '_deleted': True} for doc_id in ids]}
        try:
            answer = self._former.request('POST', '/_bulk_docs', body=body, size=len(ids), shape=_REFUSALS)
        except TooManyUnits:  # the service has limits: the next probes are cut
            return False
        return all(is_closed(result.get('error'), result.get('reason')) for result in answer)

    # -- after

    def _finish(self) -> None:
        """Copy what was stored late in spite of all, and delete the former database."""
        self._progress('delete', 0, 1)
        with suppress(DatabaseMissing):  # deleted by an earlier rotation
            closing = self._former.get_or_none(_CLOSING)
            if closing and 'to' in closing:  # else it is another database, which was created under this name
                time.sleep(_LINGER_SECONDS)
                self._since = closing['since']
                self._catch_up()
                self._former.delete()
        with suppress(Refused, Conflict):  # another one has finished it, too
            self._put_location(database=self._place['database'])
            Marks(self._new).add(self._age)
        self._progress('delete', 1, 1)


def _probes(shards: int) -> list[str]:
    """Return new ids of probes, the same number for each shard."""
    found = list[str]()
    for shard in range(shards):
        fitting = (f'{_PROBE}{uuid.uuid4().hex}' for _ in repeat(None))
        found += islice((name for name in fitting if crc32(name.encode()) * shards >> 32 == shard), _PROBES)
    return found


def _copy_security(source: Client, target: Client) -> None:
    with suppress(NotOffered):  # the service has rights of its own
        security = source.request('GET', '/_security', repeat=True)
        target.request('PUT', '/_security', body=security, shape=DONE)


def _sizes(client: Client) -> tuple[int, int, int]:
    """Return the number of tombstones, and the sizes of data and indexes in bytes."""
    info = client.info(INFO)
    return int(info['doc_del_count']), int(info['sizes']['file']), Indexes(Cluster(client)).size()
