"""Every request that is made for results: read, write what is not final yet, delete, and the set-up of the database."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from kombu.exceptions import EncodeError
from kombu.utils.functional import retry_over_time

from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.client import Client, Row, chunks
from kombu_couchdb.couchdb.group_commit import GroupCommit
from kombu_couchdb.couchdb.shapes import Shape
from kombu_couchdb.couchdb.uncertain import still_current
from kombu_couchdb.errors import (
    RETRIED,
    AccessDenied,
    Conflict,
    CouchDBError,
    DatabaseMissing,
    DocumentTooLarge,
    NestedTooDeeply,
    NotFound,
    access_denied,
)
from kombu_couchdb.log import get_logger

from .. import design
from ..options import Options
from .documents import Document, is_expired, is_final, is_outdated
from .prefork_relay import Relay

__all__ = ['Recent', 'ResultTooLarge', 'Store']

logger = get_logger(__name__)

T = TypeVar('T')

#: How often a write is tried while others keep changing the same document. A final state ends it at once.
_ATTEMPTS = 100

#: Documents read in one request: few requests for a group of a thousand, and no answer of gigabytes.
_READ = 250

#: Documents deleted in one request.
_DELETE = 500

#: How much longer than the server's time limits a pool's child waits for its parent, in seconds.
_SLOW = 1.0

#: Tasks that have begun and whose revision is remembered, so that their end is one request, too.
_BEGUN = 1000


class ResultTooLarge(DocumentTooLarge, EncodeError):
    """A result is larger than the server takes. For Celery it is one that cannot be stored: its task has failed."""


class Recent(dict[str, T]):
    """A dictionary of what came last, up to `limit`. For threads, and for forks: it needs no lock."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: str, value: T) -> None:
        super().__setitem__(key, value)
        if len(self) > self._limit:
            # A few more than need be: to make the list costs as much as to drop them.
            for old in list(self)[: len(self) - self._limit + self._limit // 10]:
                self.pop(old, None)


class Store:
    """The documents of one database. *Every* method raises the errors of `kombu_couchdb.errors`."""

    def __init__(self, client: Client, options: Options) -> None:
        self.client, self._options = client, options
        self.relay = Relay(GroupCommit(client), sum(client.timeouts) + _SLOW)
        self._revs: Recent[str] = Recent(_BEGUN)

    # -- reading

    def read(self, doc_id: str) -> Document | None:
        """Return a document, None if there is none or it has expired; one request."""
        doc = self._current(doc_id)
        return None if doc is None or is_expired(doc, self.client.clock.now()) else doc

    def read_many(self, ids: Iterable[str], *, everywhere: bool = False) -> list[Document | None]:
        """Return documents in the order of `ids`, None for those that do not exist or have expired; few requests.

        With `everywhere`, all nodes of a cluster that keep them and answer are asked, and not as many as suffice.
        """

        def read(part: Sequence[str]) -> list[Document | None]:
            if everywhere and self.client.replicas > 1:
                return self.client.fetch(part, r=self.client.replicas)
            return self.client.find(part)

        docs = [doc for part in chunks(list(ids), _READ) for doc in self._call(read, part)]
        now = self.client.clock.now()
        return [None if doc is None or is_expired(doc, now) else doc for doc in docs]

    def sequence(self) -> Any:
        """Return the point in the history of the database at which it stands now."""
        return self._call(lambda _: self.client.sequence(), None)

    def view(self, view: str, row: Shape, **params: Any) -> list[Row]:
        """Return the rows of a view of the design document, each of the shape `row`; *raises* `NotFound` if that is missing."""
        return self.client.view(design.NAME, view, row, **params)

    # -- writing, and what else a task that has ended waits for: tried again while the server is away, see `retry_policy`

    def write(self, doc: Document, *, final_stays: bool = False, also: Document | None = None) -> None:
        """Store a document over any other; with `final_stays`, not over a result that it `is_outdated` by.

        One request for a new document and for one that this process wrote last, three over another one. `also` is a
        second document, stored with the first if there is none under its id. *Raises* `Conflict` if others were always
        faster.
        """
        doc_id = doc['_id']
        # Whatever process wrote the document we remember: if it was written since, the server says so.
        rev = self._revs.pop(doc_id, None)
        for _ in range(_ATTEMPTS):
            stored = self._put_surely({**doc, '_rev': rev} if rev else doc, also)
            if stored is not None:
                if final_stays and not is_final(doc):
                    self._revs[doc_id] = stored
                return
            also = None
            current = self.current(doc_id)
            if (
                current
                and final_stays
                and not is_expired(current, self.client.clock.now())
                and is_outdated(doc, current)
            ):
                logger.debug('%s stays %s: %s is older', doc_id, current['status'], doc['status'])
                return
            rev = current['_rev'] if current else None
        raise Conflict(f'{self.client.address.url}: others kept changing {doc_id}')

    def current(self, doc_id: str) -> Document | None:
        """Return a document, though it may have expired, None if there is none; of one that cannot be read `_id` and `_rev`."""
        try:
            return self._retried(self._current, doc_id)
        except NestedTooDeeply as exc:
            logger.error('%s is written over, if it is stored: %s', doc_id, exc)
            rev = self._retried(self.client.rev, doc_id)
            return None if rev is None else {'_id': doc_id, '_rev': rev}

    def known(self, ids: Sequence[str]) -> set[str]:
        """Return those of these ids under which there is a document, or was one that has been deleted."""
        return self._retried(self.client.known, ids)

    def id_range(self, prefix: str, *, docs: bool = False) -> list[Row]:
        """Return the rows of all documents whose id starts with `prefix`."""
        return self._retried(lambda: self.client.id_range(prefix, docs=docs))

    def writes(self) -> int:
        """Return how many writes the database has seen, as CouchDB numbers them."""
        return self._retried(lambda: int(str(self.client.sequence()).partition('-')[0]))

    def put(self, doc: Document) -> str | None:
        """Store a document as it is and return its revision; None if it is in conflict with what is there."""
        return self._put_surely(doc)

    def delete(self, doc_id: str) -> None:
        """Delete a document, if it exists; two requests."""
        self._revs.pop(doc_id, None)
        for _ in range(_ATTEMPTS):
            current = self.current(doc_id)
            if current is None or self._put_surely(deletion(current)) is not None:
                return
        raise Conflict(f'{self.client.address.url}: others kept changing {doc_id}')

    def delete_all(self, docs: Sequence[Document]) -> int:
        """Delete documents by their revisions and return how many; one that was changed meanwhile stays.

        Nothing of a body stays in what CouchDB keeps of them.
        """
        count = 0
        for part in chunks([deletion(doc) for doc in docs], _DELETE):
            count += sum(result.is_stored for result in self._retried(self.client.bulk, part))
        return count

    def claim(self, doc: Document) -> str | None:
        """Write a document by its revision; return the new one if CouchDB proves that no other process wrote it.

        Neither an unproven write nor a lost answer is a proof: then no process has the claim, and a later try decides.
        """
        [result] = self._retried(self.client.bulk, [doc])
        return result.rev if result.is_proven else None

    def try_to_write(self, doc: Document) -> None:
        """Store a new document and delete it again, once; two requests. Not deleted is no error: it is to expire by itself."""
        rev = self._call(self.client.put, doc)
        try:
            self.client.put(deletion({**doc, '_rev': rev}))
        except CouchDBError as exc:
            logger.debug('%s is left to its expiry: %s', doc['_id'], exc)

    def set_up(self) -> None:
        """Make sure that the design document is there; one request where it is. *Raises* `AccessDenied`."""
        wanted = design.document()
        try:
            self._call(self.client.get, wanted['_id'])
        except NotFound:
            if not self._options.create_database:
                raise
            try:
                self._call(self.client.try_put, wanted)  # in conflict, another process has stored the same
            except AccessDenied as exc:
                raise access_denied(
                    self.client.address.url,
                    self.client.user,
                    'write the design document',
                    'let an administrator run "celery -A your_app couchdb setup"',
                ) from exc

    # -- requests

    def _put_surely(self, doc: Document, also: Document | None = None) -> str | None:
        calls = itertools.count()
        return self._retried(lambda: self._put([doc] if also is None else [doc, also], again=next(calls) > 0))

    def _put(self, docs: list[Document], *, again: bool) -> str | None:
        """Return the new revision of the first, None in case of a conflict; what other threads store meanwhile goes with it.

        After an earlier attempt (`again`) some of them may have been stored: those are not written again, see
        `kombu_couchdb.couchdb.uncertain`.
        """
        left, first = docs, docs[0]
        if again:
            left = self._call(lambda docs: still_current(self.client, docs), docs)
        try:
            results = self._call(self.relay.write, left) if left else []
            for result in results:
                if result.is_refused:
                    raise result.exception(self.client.address.url)
        except DocumentTooLarge as exc:
            what = f'the result of {first["task"]}' if first.get('task') else first['_id']
            raise ResultTooLarge(f'{what} cannot be stored: {exc}') from exc
        return next(
            (result.rev for doc, result in zip(left, results, strict=True) if doc is first and result.is_stored), None
        )

    def _current(self, doc_id: str) -> Document | None:
        return self._call(self.client.get_or_none, doc_id)

    def _retried(self, request: Callable[..., T], *args: Any) -> T:
        def failed(exc: Exception, intervals: Iterable[float], retries: int) -> float:
            pause = float(next(iter(intervals)))
            level = logging.DEBUG if retries else logging.WARNING  # once for each that waits
            logger.log(level, 'results are not stored: %s; trying again in %.1f s', exc, pause)
            return pause

        result: T = retry_over_time(request, RETRIED, args, {}, failed, **self._options.retry_policy)
        return result

    def _call(self, request: Callable[..., T], argument: Any) -> T:
        """Make a request; if the database is missing, create it and try once more."""
        try:
            return request(argument)
        except DatabaseMissing as missing:
            address = self.client.address
            if not self._options.create_database:
                raise DatabaseMissing(
                    f'{address.url}: the database does not exist, and the transport option create_database is off'
                ) from missing
            try:
                self.client.create()
            except AccessDenied as exc:
                raise access_denied(
                    address.url,
                    self.client.user,
                    'create the database, which does not exist',
                    'let an administrator run "celery -A your_app couchdb setup", or name an existing one in '
                    'result_backend',
                ) from exc
        return request(argument)
