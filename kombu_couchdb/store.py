"""Every request that is made about WorkItems, and the database they live in."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from math import inf
from typing import Any

from kombu.log import get_logger

from . import design, unique, void, workitem
from .answers import exactly, maybe, members, number, text
from .client import LAST, Client, Document, Row, chunks
from .errors import AccessDenied, BrokenAnswer, Conflict, CouchDBError, DatabaseMissing, NotFound, ServerUnavailable, from_answer
from .group_commit import GroupCommit
from .healer import write_each

__all__ = ['HORIZON', 'REVISIONS', 'Store']

logger = get_logger(__name__)

#: How many revisions of a document are remembered: heartbeats and broadcasts are written again and again, and each would keep
#: 1,000 without a limit.
REVISIONS = 20
#: How far beyond now the view is read, in seconds: the clocks that wrote `published` may run that much ahead of ours.
HORIZON = 5.0
#: Where the view has what is spoilt, instead of a date: a consumer sets it aside, and nothing else does away with it.
_SPOILT = 0
#: The rows of the views, and of their reductions by queue or kind.
_WAITING = members(id=text, key=exactly(text, number, number))
_SCHEDULED = members(id=text, key=exactly(text, number))
_COUNT = members(value=number)
_RANK = members(key=exactly(text, number))
_LEASES = members(key=exactly(text, maybe(text)), value=members(count=number, min=number, max=number))
_IDS = members(id=text)

#: Documents published in one request.
_PUBLISHED = 5000
#: Documents rewritten or deleted in one request by housekeeping, and read in its first.
_BATCH, _FIRST = 500, 16


class Store:
    """The WorkItems of one database."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._commits: GroupCommit | None = None
        #: Per queue, the ranks above the lowest in which items planned for later were met: they are stepped over.
        self._planned: dict[str, set[int]] = {}

    # -- the database

    def ensure(self, create: bool) -> None:
        """Make sure that database and design document are there; with `create`, make them.

        One request where all is well. *Raises* `AccessDenied`, `DatabaseMissing`, `NotCouchDB`, `ServerUnavailable`.
        """
        wanted = f'_design/{design.NAME}'
        try:
            self.client.get(wanted)
            return
        except BrokenAnswer:
            self.client.welcome()
            raise
        except (NotFound, DatabaseMissing) as exc:
            self.client.welcome()
            if not create:
                raise DatabaseMissing(f'{self.client.address.url}: the database is not set up, and the transport '
                                      f'option create_database is off') from exc
        try:
            self.client.create()
        except AccessDenied as exc:
            # A member may not ask; the database may exist all the same.
            if isinstance(exc.__context__, DatabaseMissing):
                raise
        try:
            for document in design.documents():
                try:
                    self.client.put(document)
                except Conflict:
                    pass  # another process was first, with the same
        except (AccessDenied, DatabaseMissing) as exc:
            raise AccessDenied(
                f'{self.client.address.url}: user {self.client.user!r} may not set up the database; let an '
                f'administrator run "celery -A your_app couchdb setup" once') from exc
        try:
            self.client.request('PUT', '/_revs_limit', body=REVISIONS)
        except CouchDBError as exc:
            logger.debug('revs_limit is left as it is: %s', exc)

    def close(self) -> None:
        """Close the idle connections; the store can still be used."""
        self.client.close()
        if self._commits is not None:
            self._commits.close()

    # -- publish

    def publish(self, docs: Sequence[Document]) -> None:
        """Store new items, in one request, and one more for each unique job. Storing the same twice is storing them once.

        *Raises* `ServerUnavailable` (whether they are stored is unknown: publish the same documents again),
        `DocumentTooLarge` (of one message, nothing is stored), `AccessDenied`.
        """
        for doc in docs:
            if 'key' in doc:
                unique.enqueue(self.client, doc)
        docs = [doc for doc in docs if 'key' not in doc]
        if self._commits is None:
            self._commits = GroupCommit.of(self.client)
        for part in chunks(docs, _PUBLISHED):
            try:
                answers = self._commits.write(part)
            except ServerUnavailable as exc:
                if not (exc.was_cut or self.client.has_other_nodes):
                    raise
                # They may have been stored, and what was done meanwhile must not be there again. To raise would do, but kombu
                # tries again under ids of its own.
                left = self.unpublished(part)
                answers = self._commits.write(left) if left else []
            for answer in answers:
                # In conflict is what a try before this one has stored, whose answer was lost.
                if answer.get('error') and answer['error'] != 'conflict':
                    raise from_answer(answer, self.client.address.url)

    def unpublished(self, docs: Sequence[Document]) -> list[Document]:
        """Return those of new items under whose ids there never was one, and the unique jobs, which look for themselves."""
        known = self.client.known([doc['_id'] for doc in docs])
        return [doc for doc in docs if 'key' in doc or doc['_id'] not in known]

    # -- consume

    def ready(self, queue: str, limit: int, *, docs: bool = False, after: Row | None = None,
              update: str = 'true') -> list[Row]:
        """Return up to `limit` rows of the view, next first: highest priority, then oldest due; with `docs`, their documents.

        With `after`, the last row of an earlier read, what follows it. `update` is CouchDB's: with `false` the index is read as
        it stands, with `lazy` it is brought up to date afterwards. Rows near the present may be due only in some seconds, and
        any row may have been claimed a moment ago: the document decides. One request, plus one for each higher priority in
        which something waits for later.
        """
        horizon = self.client.clock.now() + HORIZON
        name, planned, found = design.key_of(queue), self._planned.get(queue, set()), list[Row]()
        rank, start = (int(after['key'][1]), after['key']) if after else (0, [name, 0])
        more: dict[str, Any] = {'startkey_docid': after['id'], 'skip': 1} if after else {}
        while rank <= workitem.HIGHEST and len(found) < limit:
            last = min((r for r in planned if r >= rank), default=workitem.HIGHEST)
            wanted = limit - len(found)
            page = self.client.view(design.NAME, 'waiting', _WAITING, startkey=start, endkey=[name, last, horizon], limit=wanted,
                                    include_docs=docs, reduce=False, update=update, **more)
            later = next((i for i, row in enumerate(page) if row['key'][2] > horizon), None)
            if later is None:
                found += page
                if len(page) == wanted:
                    break
                rank = last + 1
            else:
                found += page[:later]
                rank = int(page[later]['key'][1]) + 1
                planned = self._planned.setdefault(queue, set())
                planned.add(rank - 1)
            start, more = [name, rank], {}
        return found

    def next_due(self, queue: str, after: float) -> float | None:
        """Return when the first item that is planned for later than `after` becomes due, or None if there is none."""
        rows = self.client.view(design.NAME, 'scheduled', _SCHEDULED, **design.rows_of(queue, after), limit=1, reduce=False)
        return float(rows[0]['key'][1]) if rows else None

    # -- leases

    def leases(self) -> dict[str, dict[str, Document]]:
        """Return statistics of `expires` in five groups, by name: `consumer`, `claim` (by consumer), `queue`, `limit`, `expiry`.

        `limit` has the queues with a message TTL or a length limit, `expiry` all messages that expire, under None. The
        statistics are CouchDB's `_stats`: `sum`, `count`, `min`, `max`. One request.
        """
        leases: dict[str, dict[str, Document]] = {'consumer': {}, 'claim': {}, 'queue': {}, 'limit': {}, 'expiry': {}}
        for row in self.client.view(design.NAME, 'leases', _LEASES, group_level=2):
            kind, name = row['key']
            leases.setdefault(kind, {})[str(design.queue_of(name)) if kind in ('queue', 'limit') else name] = row['value']
        return leases

    def claims(self, consumer: str) -> Iterator[Document]:
        """Yield the items that a consumer has claimed; they are read some at a time, as they are asked for."""
        rows = self.client.view(design.NAME, 'leases', _IDS, startkey=['claim', consumer], endkey=['claim', consumer, LAST],
                                reduce=False)
        ids, count = [row['id'] for row in rows], _FIRST
        while ids:
            docs = [doc for doc in self.client.fetch(ids[:count]) if doc]
            ids, largest = ids[count:], max(map(workitem.size, docs), default=0)
            count = max(1, min(2 * count, _BATCH, self.client.request_bytes // max(1, largest)))
            yield from (doc for doc in docs if workitem.claimant(doc) == consumer)

    def release(self, docs: Iterable[Document]) -> int:
        """Give claimed items back to their queues and return how many; who changed one meanwhile keeps it."""
        count, size, part = 0, 0, list[Document]()
        now = self.client.clock.now()
        for doc in docs:
            if part and (len(part) >= _BATCH or size + workitem.size(doc) > self.client.request_bytes):
                count, size, part = count + self._written(part), 0, []
            size, part = size + workitem.size(doc), [*part, *workitem.apart(releasable(doc, now), now)]
        return count + self._written(part)

    def _written(self, docs: list[Document]) -> int:
        return sum(1 for answer in self.client.bulk(docs) if answer.get('ok'))

    def settle_void(self, doc_id: str, rev: str, living: set[str]) -> bool:
        """Do what is to be done about a claim that a cluster did not prove; tell whether that was all."""
        leaves = self.client.leaves(doc_id)
        seen = self.client.fetch([doc_id])[0]
        changes = void.decide(leaves, str(seen['_rev']) if seen else None, rev, self._claimants(leaves, living),
                              self.client.clock.now())
        return changes is not None and write_each(self.client, changes)

    def heal(self, leaves: list[Document], living: Collection[str]) -> list[Document] | None:
        """Return what is to be written about an item with these leaves; see `void.heal`."""
        return void.heal(leaves, self._claimants(leaves, living), self.client.clock.now())

    def _claimants(self, leaves: list[Document], living: Collection[str]) -> set[str]:
        """Return those of the claimants that live: the view which said so may have lagged behind."""
        names = {by for leaf in leaves if (by := workitem.claimant(leaf))}
        unknown = sorted(names - set(living))
        return (names & set(living)) | {name for name, doc in zip(unknown, self.client.find(unknown), strict=True) if doc}

    # -- queues

    def size(self, queue: str) -> int:
        """Return how many items of a queue are ready: neither claimed nor planned for later."""
        waiting = self._count('waiting', queue)
        return max(0, waiting - self._count('scheduled', queue, self.client.clock.now())) if waiting else 0

    def purge(self, queue: str, until: float = inf) -> int:
        """Delete what waits in a queue, now or for later, and return how many; claimed items are left.

        As with those below, from the monotonic time `until` on the rest is left.
        """
        return self._drop('waiting', lambda doc: True, until, **design.rows_of(queue))

    # -- limits

    def drop_expired(self, until: float = inf) -> int:
        """Delete what has expired and return how many that were."""
        now = self.client.clock.now()
        return self._drop('expiring', lambda doc: workitem.has_expired(doc, now), until, endkey=now)

    def drop_older(self, queue: str, ttl: float, until: float = inf) -> int:
        """Delete what has been ready in a queue for more than `ttl` seconds, and return how many that were."""
        name, last = design.key_of(queue), self.client.clock.now() - ttl
        ranks = [row['key'][1] for row in self.client.view(design.NAME, 'waiting', _RANK, **design.rows_of(queue), group_level=2)]
        return sum(self._drop('waiting', lambda doc: workitem.ready_since(doc) <= last, until,
                              startkey=[name, rank, _SPOILT + 1], endkey=[name, rank, last]) for rank in ranks)

    def exceeds(self, queue: str, length: int) -> bool:
        """Tell whether more than `length` items wait in a queue, those that are planned for later included."""
        return self._count('waiting', queue) > length

    def trim(self, queue: str, length: int, until: float = inf) -> int:
        """Delete those first in line of more than `length` ready items, and return how many that were; one request if none is."""
        count = 0
        while self.exceeds(queue, length) and (excess := self.size(queue) - length) > 0:
            rows = self.ready(queue, min(excess, _BATCH), docs=True)
            # Counted again after they were read: others may have dropped some of them meanwhile, and none too many shall go.
            excess, now = self.size(queue) - length, self.client.clock.now()
            docs = [row['doc'] for row in rows if row.get('doc') and row['key'][2] > _SPOILT and workitem.is_due(row['doc'], now)]
            deleted = self._delete(docs[:max(0, excess)])
            count += deleted
            if not deleted or time.monotonic() >= until:
                break
        return count

    def _drop(self, view: str, unwanted: Callable[[Document], bool], until: float, **where: Any) -> int:
        count = 0
        while rows := self.client.view(design.NAME, view, _IDS, limit=_BATCH, include_docs=True, reduce=False, **where):
            # The documents may be newer than the rows.
            deleted = self._delete([row['doc'] for row in rows if row.get('doc') and unwanted(row['doc'])])
            count += deleted
            if not deleted or time.monotonic() >= until:
                break  # others are faster: what is left is theirs; or it is left for later
        return count

    def _delete(self, docs: list[Document]) -> int:
        return self._written([workitem.acked(doc, self.client.clock.now()) for doc in docs if workitem.is_waiting(doc)])

    def _count(self, view: str, queue: str, *after: float) -> int:
        rows = self.client.view(design.NAME, view, _COUNT, **design.rows_of(queue, *after))
        return int(rows[0]['value']) if rows else 0


def releasable(doc: Document, now: float) -> Document:
    """Return `doc` released, or buried if it is spoilt: a spoilt one can be neither counted nor delivered."""
    reason = workitem.flaw(doc)
    return workitem.bury(doc, reason, now) if reason else workitem.release(doc)
