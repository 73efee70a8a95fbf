"""The result database: its address, its creation when it is missing, and the store of results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from kombu.exceptions import EncodeError
from kombu.utils.functional import retry_over_time

from kombu_couchdb.couchdb.address import Address, parse_list
from kombu_couchdb.couchdb.bulk import ATTEMPTS, BATCH_DOCS, MAX_REQUEST_BYTES, deletion
from kombu_couchdb.couchdb.client import Client, Row, chunks
from kombu_couchdb.couchdb.group_commit import GroupCommit
from kombu_couchdb.couchdb.shapes import Shape
from kombu_couchdb.couchdb.write_result import WriteResult
from kombu_couchdb.errors import (
    RETRIED,
    AccessDenied,
    Conflict,
    CouchDBError,
    DatabaseMissing,
    DocumentTooLarge,
    NotFound,
    access_denied,
)
from kombu_couchdb.log import get_logger
from kombu_couchdb.options import LOGIN_OPTIONS, login_options
from kombu_couchdb.outage import Outage

from .. import design
from ..options import ResultOptions, refuse_settings_of_redis
from .documents import ChordPart, Document, is_expired, is_final, is_outdated
from .queue_item import QueueItem, Refusal

logger = get_logger(__name__)

A = TypeVar('A')
T = TypeVar('T')

#: Sends documents, given without their values and as JSON, in one request, and returns the result for each.
Send = Callable[[Sequence[Mapping[str, Any]], Sequence[bytes]], list[WriteResult]]

#: Returns a document with less in it, given one that CouchDB refuses as too large and the error; None if there is none.
Shorter = Callable[[QueueItem, CouchDBError], QueueItem | None]

#: Documents in one request to delete.
_DELETE_DOCS = 500

#: Results of unfinished tasks whose revisions are remembered, so that the final result needs one request only.
_REMEMBERED_REVISIONS = 1000


class ResultTooLarge(DocumentTooLarge, EncodeError):
    """A result is larger than the server accepts. Celery treats this as an encoding error: the task has failed."""

    @classmethod
    def of(cls, doc: Mapping[str, Any], error: CouchDBError) -> ResultTooLarge:
        """Return the error for a document that CouchDB refuses with `error`; its value is not needed."""
        what = f'the {doc.get("error") or "result"} of {doc["task"]}' if doc.get('task') else doc['_id']
        return cls(f'{what} cannot be stored: {error}')


class Recent(dict[str, T]):
    """A dictionary of the newest entries, up to `limit`. Threads and forked processes may use it without a lock."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: str, value: T) -> None:
        super().__setitem__(key, value)
        if len(self) > self._limit:
            # Remove a tenth more than necessary: making the list costs as much as removing the entries.
            for old in list(self)[: len(self) - self._limit + self._limit // 10]:
                self.pop(old, None)


#: Options of the broker that hold for results as well, if the options of results do not have them.
_INHERITED = ('auth', 'token_url', 'proxy_roles', 'connect_timeout', 'request_timeout')


def settings_of(conf: Any, url: str | None) -> tuple[ResultOptions, Address]:
    """Return the options of results in the configuration of an app, and the address in `url`.

    What they leave open is taken from the settings of the broker, if that is CouchDB, too: some options, TLS, and, if
    the server is the same, user and password. *Raises* `ConfigurationError` for a wrong option, an invalid URL or
    settings of Redis.
    """
    refuse_settings_of_redis(conf)
    given, url = conf.get('result_backend_transport_options') or {}, url or 'couchdb://'
    options, tls, broker = conf.broker_transport_options or {}, conf.broker_use_ssl, conf.broker_write_url or ''
    urls = (broker if isinstance(broker, str) else ';'.join(broker)).split(';')
    if not urls[0].startswith(('couchdb:', 'couchdbs:')):
        own = ResultOptions.of(given)
        return own, address_of(url, own)
    login = {name: options[name] for name in LOGIN_OPTIONS if name in options}
    node = parse_list(urls, 'broker_url', 'celery', tls=tls, **login)
    own = ResultOptions.of(given, {name: options[name] for name in _INHERITED if name in options})
    return own, address_of(url, own, (node, *node.others), tls)


def address_of(
    url: str, options: ResultOptions | None = None, broker: Sequence[Address] = (), tls: Any = None
) -> Address:
    """Return the address in `url`: a `couchdb://` or `couchdbs://` URL, or one for each node, separated by semicolons.

    `broker` has the addresses of the broker's nodes, and `tls` is what holds for URLs without TLS parameters. *Raises*
    `ConfigurationError` for an invalid URL; its text does not contain the URL, which may have a password in it.
    """
    options, urls = options or ResultOptions(), url.split(';')
    node = parse_list(urls, 'result_backend', 'celery_results', tls=tls, **login_options(options))
    first, *others = (
        _completed(node, broker, has_tls='ssl' in url.partition('?')[2], auth=options.auth)
        for url, node in zip(urls, (node, *node.others), strict=True)
    )
    return replace(first, others=tuple(others))


def _completed(node: Address, broker: Sequence[Address], *, has_tls: bool, auth: str | None) -> Address:
    """Return the address of a node with what its URL leaves open, from the broker's node on the same server."""
    same = next((each for each in broker if each.server == node.server), node)
    if not has_tls:
        node = replace(node, verify=same.verify, cert=same.cert)
    if node.user or node.password or node.credentials:
        return node
    return replace(node, user=same.user, password=same.password, credentials=same.credentials, auth=auth or same.auth)


class Database:
    """One result database. `may_create` is the transport option `create_database`.

    *Every* method raises the errors of `kombu_couchdb.errors`.
    """

    def __init__(self, client: Client, may_create: bool) -> None:
        self._client, self._may_create = client, may_create

    def set_up(self) -> None:
        """Create the database and its design document if they do not exist; one request if both exist.

        *Raises* `AccessDenied` if the user may not create them, and `DatabaseMissing` or `NotFound` if they are missing
        and the transport option `create_database` is off.
        """
        wanted = design.document()
        try:
            self.call(self._client.get, wanted['_id'])
        except NotFound:
            if not self._may_create:
                raise
            with self._explained('write the design document'):
                self.call(self._client.try_put, wanted)  # a conflict means that another process has stored it

    def call(self, request: Callable[[A], T], argument: A) -> T:
        """Make a request; if the database is missing, create it and make the request again."""
        try:
            return request(argument)
        except DatabaseMissing as missing:
            if not self._may_create:
                url = self._client.address.url
                raise DatabaseMissing(
                    f'{url}: the database does not exist, and the transport option create_database is off'
                ) from missing
            with self._explained(
                'create the database, which does not exist', ', or name an existing one in result_backend'
            ):
                self._client.create()
        return request(argument)

    @contextmanager
    def _explained(self, action: str, remedy: str = '') -> Iterator[None]:
        """Raise an error that names the action and the remedy if the user lacks the right."""
        try:
            yield
        except AccessDenied as exc:
            remedy = f'let an administrator run "celery -A your_app couchdb setup"{remedy}'
            raise access_denied(self._client.address.url, self._client.who, action, remedy) from exc


class ResultStore:
    """The documents of one result database. *Every* method raises the errors of `kombu_couchdb.errors`.

    The methods from `write` to `claim` are retried while the server does not respond, as the transport option
    `retry_policy` says. The other methods are not retried.
    """

    def __init__(self, client: Client, options: ResultOptions) -> None:
        self.client, self._options, self.database = client, options, Database(client, options.create_database)
        self._commit = GroupCommit(client)
        self._outage = Outage(logger, 'results are not stored: %s; trying again', 'results are stored again')
        #: Called with the ids of documents that are read or written next: results that were handed over come first.
        self.before_access: list[Callable[[Sequence[str]], None]] = []
        self._revs: Recent[tuple[str, Mapping[str, Any]]] = Recent(_REMEMBERED_REVISIONS)

    # -- reading

    def read(self, doc_id: str) -> Document | None:
        """Return a document, or None if there is none or it has expired; one request."""
        self._settle([doc_id])
        doc = self.database.call(self.client.get_or_none, doc_id)
        return None if doc is None or is_expired(doc, self.client.clock.now()) else doc

    def read_many(self, ids: Iterable[str], *, everywhere: bool = False) -> list[Document | None]:
        """Return the documents with these `ids`, in their order, with None for missing and expired ones.

        This takes one request for each 250 ids. With `everywhere`, a cluster reads every copy that responds, instead of
        as many copies as a read needs.
        """

        def read(part: Sequence[str]) -> list[Document | None]:
            if everywhere and self.client.replicas > 1:
                return self.client.fetch(part, r=self.client.replicas)
            return self.client.find(part)

        ids = list(ids)
        self._settle(ids)
        docs = [doc for part in chunks(ids, BATCH_DOCS) for doc in self.database.call(read, part)]
        now = self.client.clock.now()
        return [None if doc is None or is_expired(doc, now) else doc for doc in docs]

    def sequence(self) -> Any:
        """Return the current update sequence of the database, from which a changes feed can start."""
        return self.database.call(lambda _: self.client.sequence(), None)

    def view(self, view: str, row: Shape, **params: Any) -> list[Row]:
        """Return the rows of a view, each of the shape `row`; *raises* `NotFound` if the design document is missing."""
        return self.client.view(design.NAME, view, row, **params)

    # -- writing, and the reads of chords: retried while the server does not respond

    def write(self, doc: Mapping[str, Any], part: ChordPart | None = None, shorter: Shorter | None = None) -> None:
        """Store a document in place of any other under its id, but keep a stored result that it must not replace.

        See `is_outdated`. `part` is that of a chord, which is stored in the same request if it is not stored yet. If
        CouchDB refuses the document for its size, what `shorter` returns is stored in its place.

        This takes one request for a new document, and for one that this process wrote last; three requests to replace
        another one. Threads that write at the same time share a request. *Raises* `ResultTooLarge` if CouchDB refuses
        the document for its size, and `Conflict` if other processes changed it during each of 100 attempts.
        """
        self._settle([doc['_id']])
        item = QueueItem.encode(doc, part)
        if part and len(item.text) > MAX_REQUEST_BYTES:  # the result has a request of its own, and may be refused
            self.write(doc, shorter=shorter)
            item = QueueItem.encode(part)
        while refusals := self._write_one(item):
            [(item, error)] = refusals
            if not isinstance(error, DocumentTooLarge):
                raise error
            instead = shorter(item, error) if shorter else None
            if instead is None:
                raise ResultTooLarge.of(item.head, error) from error
            item = instead

    def _write_one(self, item: QueueItem) -> list[Refusal]:
        attempts = itertools.count()
        return self.retried(lambda: self.write_batch([item], uncertain=next(attempts) > 0, send=self._commit.write))

    def current(self, doc_id: str) -> Document | None:
        """Return a document even if it has expired, or None if there is none."""
        return self.retried(self._current, [doc_id])[0]

    def known(self, ids: Sequence[str]) -> set[str]:
        """Return those of these ids that have a document, or had one that was deleted."""
        return self.retried(self.client.known, ids)

    def id_range(self, prefix: str, *, docs: bool = False) -> list[Row]:
        """Return the rows of all documents whose id starts with `prefix`."""
        return self.retried(lambda: self.client.id_range(prefix, docs=docs))

    def writes(self) -> int:
        """Return the number of the last write to the database, as CouchDB counts them."""
        return int(str(self.retried(self.client.sequence)).partition('-')[0])

    def put(self, doc: Mapping[str, Any]) -> str | None:
        """Store a document with the `_rev` that it has and return its new revision, or None in case of a conflict."""
        attempts = itertools.count()

        def put() -> str | None:
            if next(attempts) and not self.database.call(self.client.still_current, [doc]):
                return None  # an earlier attempt has stored it, or another process has changed it
            [result] = self.database.call(self._commit.write, [doc])
            if result.is_refused:
                raise result.exception(self.client.address.url)
            return result.rev if result.is_stored else None

        try:
            return self.retried(put)
        except DocumentTooLarge as exc:
            raise ResultTooLarge.of(doc, exc) from exc

    def delete(self, doc_id: str, before: Callable[[Document], None] = lambda doc: None) -> None:
        """Delete a document if it exists; two requests. `before` gets it first. *Raises* `Conflict` as `write` does."""
        self._settle([doc_id])
        self._revs.pop(doc_id, None)
        for _ in range(ATTEMPTS):
            current = self.current(doc_id)
            if current is not None:
                before(current)
            if current is None or self.put(deletion(current)) is not None:
                return
        raise self.too_many_conflicts(doc_id)

    def delete_all(self, docs: Sequence[Mapping[str, Any]]) -> int:
        """Delete the documents that still have these revisions, and return how many were deleted.

        The deleted revisions, which CouchDB keeps, have no content.
        """
        count = 0
        for part in chunks([deletion(doc) for doc in docs], _DELETE_DOCS):
            count += sum(result.is_stored for result in self.retried(self.client.bulk, part))
        return count

    def claim(self, doc: Mapping[str, Any]) -> str | None:
        """Write a document over its revision; return the new revision if CouchDB proves that no other process wrote it.

        An unproven write and a lost response are no proof: then no process has the claim, and a later attempt decides.
        """
        [result] = self.retried(self.client.bulk, [doc])
        return result.rev if result.is_proven else None

    # -- many results in one request: not retried

    def write_batch(
        self, batch: Sequence[QueueItem], *, uncertain: bool = False, send: Send | None = None
    ) -> list[Refusal]:
        """Store results with different ids, unless newer ones are stored; return those that CouchDB refuses.

        With `uncertain`, an earlier attempt got no response: what it has stored is not written again. One request, or
        `send`, if nothing is in conflict. *Raises* the errors of an outage: then it is unknown what is stored.
        """
        refusals: list[Refusal] = []
        left = self._newer_than_stored(batch) if uncertain else [self._with_known_revision(item) for item in batch]
        for _ in range(ATTEMPTS):
            if not left:
                return refusals
            left = self._newer_than_stored(self._write(left, send or self._bulk, refusals))
        return refusals + [(item, self.too_many_conflicts(item.id)) for item in left]

    def _write(self, batch: Sequence[QueueItem], send: Send, refusals: list[Refusal]) -> list[QueueItem]:
        """Write results, add the refused ones to `refusals` and return those in conflict."""
        docs: list[Document] = []
        texts: list[bytes] = []
        for item in batch:
            its_docs, its_texts = item.docs()
            docs += its_docs
            texts += its_texts
        results = iter(self.database.call(lambda docs: send(docs, texts), docs))
        where, conflicting = self.client.address.url, list[QueueItem]()
        for item in batch:
            result = next(results)
            part = next(results) if item.part else None
            if part is not None and not part.is_refused:  # in conflict: it is stored already
                item.part = b''
            if result.is_conflict:
                conflicting.append(item)
                continue
            refused = next((found for found in (result, part) if found is not None and found.is_refused), None)
            if refused is not None:
                refusals.append((item, refused.exception(where)))
            else:
                self._note_stored(item.head, result.rev)
        return conflicting

    def _bulk(self, docs: Sequence[Mapping[str, Any]], texts: Sequence[bytes]) -> list[WriteResult]:
        return self.client.bulk(docs, texts=texts)

    def _with_known_revision(self, item: QueueItem) -> QueueItem:
        """Set the revision of the unfinished result that `item` replaces, if this process has stored that.

        None if the stored one is of a newer delivery: then the write conflicts, and the results are compared.
        """
        rev, stored = self._revs.pop(item.id, (None, {}))
        item.rev = None if rev is None or is_outdated(item.head, stored) else rev
        return item

    def _note_stored(self, doc: Mapping[str, Any], rev: str) -> None:
        """Remember the revision of a result that was stored, if its task is unfinished."""
        if doc.get('type') == 'Result':
            logger.debug('%s is stored with the state %s', doc['_id'], doc['status'])
            if not is_final(doc):
                self._revs[doc['_id']] = rev, {name: doc.get(name) for name in ('status', 'delivery')}

    def _newer_than_stored(self, batch: Sequence[QueueItem]) -> list[QueueItem]:
        """Return the results that must replace what is stored, with the revisions to be replaced."""
        if not batch:
            return []
        now, left = self.client.clock.now(), list[QueueItem]()
        for item, current in zip(batch, self._current([item.id for item in batch]), strict=True):
            if current is not None and item.head.get('type') == 'Part':
                continue  # a part is never replaced
            if current is not None and not is_expired(current, now) and is_outdated(item.head, current):
                logger.debug('%s keeps the state %s: %s is outdated', item.id, current['status'], item.head['status'])
                if not item.part:
                    continue
                item.head = {**item.head, '_id': item.part_id, 'type': 'Part'}  # only its part is still to be stored
                item.text, item.part, item.rev = item.part, b'', None
            else:
                item.rev = current['_rev'] if current else None
            left.append(item)
        return left

    def try_to_write(self, doc: Mapping[str, Any]) -> None:
        """Store a new document and delete it again, without retries; two requests.

        It is no error if the document cannot be deleted: it should have `expires`.
        """
        rev = self.database.call(self.client.put, doc)
        try:
            self.client.put(deletion({**doc, '_rev': rev}))
        except CouchDBError as exc:
            logger.debug('%s could not be deleted; it expires: %s', doc['_id'], exc)

    def too_many_conflicts(self, doc_id: str) -> Conflict:
        """Return the error for a document that other processes changed during each attempt to write it."""
        return Conflict(f'{self.client.address.url}: other processes kept changing {doc_id} while it was to be written')

    # -- requests

    def _settle(self, ids: Sequence[str]) -> None:
        for settle in tuple(self.before_access):
            settle(ids)

    def _current(self, ids: Sequence[str]) -> list[Document | None]:
        """Return documents even if they have expired, and None for missing ones; one request."""
        return self.database.call(self.client.find, ids)

    def retried(self, request: Callable[..., T], *args: Any) -> T:
        """Make a request, and repeat it as the transport option `retry_policy` says while the server is unavailable."""

        def failed(exc: Exception, intervals: Iterable[float], retries: int) -> float:
            self._outage.failed(exc)
            return float(next(iter(intervals)))

        # The pauses alone would not limit the time: a server that hangs costs each attempt its time limit.
        policy, limit = self._options.retry_policy, self.client.options.seconds
        timeout = (
            policy.get('max_retries') is not None and policy['max_retries'] * policy.get('interval_max', 30) + limit
        )
        result: T = retry_over_time(request, RETRIED, args, {}, failed, **policy, timeout=timeout)
        self._outage.recovered()
        return result
