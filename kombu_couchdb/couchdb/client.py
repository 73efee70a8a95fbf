"""The client of one CouchDB database: documents, leaf revisions, rows of views, changes, and the database itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import md5
from typing import Any, TypeVar, cast

import requests

from .. import errors
from ..values import chunks, revision_parts
from . import shapes
from .address import Address
from .bulk import BulkWrite, RequestSize, Unusable, first_revision, read_in_parts
from .call import Call, HTTPOptions
from .clock import ServerClock
from .failures import from_answer, not_offered
from .http import Connections, decoded, encoded, path_of, query_of
from .pacing import Pace
from .server import Server
from .shapes import Document, Row, Shape, anything, document, items, maybe, members
from .write_result import WriteResult

__all__ = ['LAST', 'Client', 'Document', 'Row', 'chunks', 'path_of']

#: Sorts after every string and number in the key of a view.
LAST: dict[str, Any] = {}

#: The shape of the response to `/_session`.
_SESSION = members(userCtx=members(name=maybe(shapes.text), roles=items(shapes.text)))

#: Any object.
_ANY = members()

#: How long to wait for CouchDB's information about an index, in seconds.
_INFO_SECONDS = 2.0

_Doc = TypeVar('_Doc', bound=Mapping[str, Any])

_DEFAULTS = HTTPOptions()


class Client:
    """Requests to one database. Thread-safe. Durations are seconds.

    *Every* method raises the errors of `kombu_couchdb.errors`.
    """

    def __init__(self, address: Address, options: HTTPOptions = _DEFAULTS) -> None:
        self.address, self.options = address, options
        #: What this process knows of the server.
        self.server = Server.of(address)
        self._nodes = (address, *address.others)
        self._connections = [
            Connections(node.server, node.url, node.verify, node.cert, options.idle_connections) for node in self._nodes
        ]
        #: Documents that cannot be written.
        self.unusable = Unusable()
        #: The size of the requests that write many documents.
        self.request_size = RequestSize()
        #: The number of nodes that store each document; 1 on a single node. It is 1, too, until the first call of
        #: `is_cluster`, of `find` with several ids, or of `sequence`, which consumers call when they start.
        self.replicas = 1
        self._knows_replicas = False
        #: How often requests to views have failed, see `query`.
        self.failed_views = 0

    # -- the server

    @property
    def clock(self) -> ServerClock:
        """The server's time. Before its first use in a process, the server is asked for it, once."""
        clock = self.server.clock
        if not clock.was_asked:
            with suppress(errors.CouchDBError):  # the local time counts until the server responds
                self._send('HEAD', '/', is_of_server=True)
            clock.was_asked = True
        return clock

    @property
    def url(self) -> str:
        """The URL of the database on the current node, without user and password."""
        return self.node.url

    @property
    def node(self) -> Address:
        """The address of the current node."""
        return self._nodes[self.server.current]

    @property
    def user(self) -> str | None:
        """The name of the user that sends the requests; None if it is not known, or if there is none."""
        return self.server.node.auth.user

    @property
    def who(self) -> str | None:
        """The words for the user that sends the requests; None if they are anonymous."""
        return self.server.node.auth.who

    @property
    def pace(self) -> Pace | None:
        """The pace of this process's requests to the server; None if it is not known to have limits."""
        return self.server.pace

    @property
    def has_other_nodes(self) -> bool:
        """Whether the address names several nodes, so that the request after a failed one goes to another node."""
        return len(self._nodes) > 1

    def switch_node(self) -> None:
        """Send later requests to another node, if there is one. For callers that find the current node partitioned."""
        self.server.switch_from(self.server.current)

    def close(self) -> None:
        """Close idle connections. Later requests open new ones."""
        for connections in self._connections:
            connections.close()

    def beside(self, database: str) -> Client:
        """Return a client for another database on the same server, with the same user and options."""
        return type(self)(self.address.beside(database), self.options)

    def welcome(self) -> Document:
        """Return CouchDB's response to `GET /`; *raises* `NotCouchDB` if another service responds."""
        try:
            greeting = self.request('GET', '/', repeat=True, is_of_server=True, shape=lambda response: True)
        except (errors.NotFound, errors.RequestRefused):
            greeting = None
        if not isinstance(greeting, dict) or not ({'couchdb', 'express-pouchdb'} & set(greeting)):
            raise errors.NotCouchDB(
                f'{self.address.server} responds, but is not a CouchDB server; check host and port in the URL'
            )
        return greeting

    def session(self) -> Document:
        """Return what CouchDB knows of the user who sends the requests: its `name` and its `roles`."""
        found = self.request('GET', '/_session', repeat=True, is_of_server=True, shape=_SESSION)
        return cast(Document, found['userCtx'])

    # -- any request

    def request(
        self,
        method: str,
        path: str,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        *,
        repeat: bool = False,
        is_of_server: bool = False,
        size: int = 1,
        timeout: float | None = None,
        shape: Shape = anything,
    ) -> Any:
        """Send a request and return the JSON of the response.

        `path` is relative to the URL of the database, or of the server (`is_of_server`). `body` is JSON or an object.
        With `repeat`, for reads, the request is sent again if the connection was cut before the response. `size` is the
        number of documents in the body, and `timeout` replaces the time limit for the response, in seconds.

        *Raises* `BrokenAnswer` if the response does not have the `shape`, and `NotOffered` if `path` is an endpoint for
        administrators that the service does not offer.
        """
        try:
            response = self._send(
                method, path, params, body, timeout, repeat=repeat, is_of_server=is_of_server, size=size
            )
        except errors.CouchDBError as exc:
            if error := not_offered(exc, path, self.address.server, self.session, is_of_server=is_of_server):
                raise error from exc
            raise
        text, status = response.content, response.status_code
        del response  # it may contain a session cookie, and recorded tracebacks show the variables of their frames
        return self.decode(text, status, f'{method} {path}', shape)

    def open_longpoll(self, path: str, params: Mapping[str, Any], body: Any, timeout: float) -> requests.Response:
        """Send a longpoll and return its response without reading the body. It may be silent for `timeout` seconds."""
        return self._send('POST', path, params, body, timeout, longpoll=True)

    def _send(
        self,
        method: str,
        path: str,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        timeout: float | None = None,
        **fields: Any,
    ) -> requests.Response:
        """Send a request with these further `fields` of `Call`, and return the response."""
        if isinstance(body, dict) and 'queries' in body:
            fields['size'] = len(body['queries'])
        fields['body'] = body if body is None or isinstance(body, bytes) else encoded(body)
        fields['timeouts'] = (
            self.options.connect_timeout,
            self.options.request_timeout if timeout is None else timeout,
        )
        return self.server.send(Call(method, path, query_of(params) if params else '', **fields), self._connections)

    def content(self, path: str, params: Mapping[str, Any], size: int) -> bytes:
        """Return the bytes of an attachment, which has `size` bytes; *raises* `BrokenAnswer` for another size."""
        text = self._send('GET', path, params, repeat=True, extra_bytes=size).content
        if len(text) != size:
            raise errors.BrokenAnswer(f'{self.address.url}: unexpected response to GET {path:.100}')
        return text

    def decode(self, text: bytes, status: int = 200, request: str = 'a request', shape: Shape = anything) -> Any:
        """Return the JSON in the response `text` to a `request`, which error texts name.

        *Raises* `BrokenAnswer` if it is incomplete or does not have the `shape`, `NotCouchDB` if it is not JSON.
        """
        try:
            found = decoded(text)
        except ValueError as exc:
            if text.lstrip()[:1] in (b'{', b'['):
                raise errors.BrokenAnswer(f'{self.address.url}: the response was cut off') from exc
            raise errors.NotCouchDB(
                f'{self.address.server} responds with status {status}, without JSON: not a CouchDB server; check host '
                f'and port'
            ) from exc
        if not shape(found):
            raise errors.BrokenAnswer(f'{self.address.url}: unexpected response to {request:.100}')
        return found

    # -- documents

    def raw(self, doc_id: str) -> bytes:
        """Return a document as CouchDB's JSON text; *raises* `NotFound`."""
        return self._send('GET', path_of(doc_id), repeat=True).content.strip()

    def get(self, doc_id: str, **params: Any) -> Document:
        """Return a document; *raises* `NotFound`. `params` are CouchDB's query parameters."""
        return cast(Document, self.request('GET', path_of(doc_id), params, repeat=True, shape=document(doc_id)))

    def get_or_none(self, doc_id: str) -> Document | None:
        """Return a document, or None if it does not exist."""
        try:
            return self.get(doc_id)
        except errors.NotFound:
            return None

    def fetch(self, ids: Sequence[str], **params: Any) -> list[Document | None]:
        """Return the documents with these ids, in this order; None if the document is deleted.

        Use `find` for ids that may never have existed. `params` are CouchDB's query parameters.
        """
        return read_in_parts(lambda part: self._fetch(part, **params), ids)

    def _fetch(self, ids: Sequence[str], **params: Any) -> list[Document | None]:
        if not params and len(ids) <= (self.pace.reads_for_query if self.pace else 1):
            return [self.get_or_none(doc_id) for doc_id in ids]
        by_id = dict(zip(ids, self._bulk_get(ids, **params), strict=True))
        found = {name: docs[0] if docs and not docs[0].get('_deleted') else None for name, docs in by_id.items()}
        conflicted = [name for name, docs in by_id.items() if len(docs) > 1]
        found.update(zip(conflicted, self._winners(conflicted), strict=True))
        return [found[name] for name in ids]

    def find(self, ids: Sequence[str]) -> list[Document | None]:
        """Return the documents with these ids, in this order; None if it does not exist, or never existed.

        If a document never existed, a cluster responds to `fetch` only after every node has reported that, or is known
        to be down: while one node does not respond, that takes a minute (measured with CouchDB 3.5). `find` needs
        responses of a majority of nodes at most.
        """
        return read_in_parts(self._find, ids)

    def _find(self, ids: Sequence[str]) -> list[Document | None]:
        if len(ids) == 1:
            return [self.get_or_none(ids[0])]
        return self._winners(ids) if ids and self.is_cluster() else self._fetch(ids)

    def leaves(self, doc_id: str, **params: Any) -> list[Document]:
        """Return all leaf revisions of a document, deleted ones included; an empty list if it never existed."""
        try:
            params = {'open_revs': 'all', **params}
            shape = items(members(ok=maybe(document(doc_id))))
            found = self.request('GET', path_of(doc_id), params, repeat=True, shape=shape)
        except errors.NotFound:
            return []
        return [leaf['ok'] for leaf in found if leaf.get('ok')]

    def known_leaves(self, doc_id: str) -> list[Document]:
        """Do the same as `leaves`, for an id that may never have existed: see `find`."""
        return [] if self.is_cluster() and not self.known([doc_id]) else self.leaves(doc_id)

    def fetch_leaves(self, ids: Sequence[str], **params: Any) -> list[list[Document]]:
        """Return a list of `leaves` for each of these ids, in this order; one request."""
        return read_in_parts(lambda part: self._bulk_get(part, **params), ids)

    def _bulk_get(self, ids: Sequence[str], **params: Any) -> list[list[Document]]:
        if not ids:
            return []
        # _bulk_get needs less than half the time of _all_docs (0.13 and 0.3 ms per document, measured on CouchDB 3.5).
        body = {'docs': [{'id': doc_id} for doc_id in dict.fromkeys(ids)]}
        shape = members(results=items(shapes.found_leaves))
        results = self.request('POST', '/_bulk_get', params, body, repeat=True, shape=shape)['results']
        leaves = {result['id']: [leaf for found in result['docs'] if (leaf := self._leaf(found))] for result in results}
        if leaves.keys() != set(ids):
            raise errors.BrokenAnswer(f'{self.address.url}: unexpected response to POST /_bulk_get')
        return [leaves[doc_id] for doc_id in ids]

    def _leaf(self, found: Document) -> Document | None:
        if 'ok' in found:
            return cast('Document | None', found['ok'])
        error = found.get('error') or {'error': 'not_found'}  # the embedded server returns an empty object
        if error.get('error') == 'not_found':
            return None
        raise from_answer(error, self.address.url)

    def _winners(self, ids: Sequence[str]) -> list[Document | None]:
        if not ids:
            return []
        shape = members(rows=shapes.exactly(*map(shapes.winner_row, ids)))
        body = {'keys': list(ids)}
        found = self.request('POST', '/_all_docs', {'include_docs': True}, body, repeat=True, shape=shape)
        return [row.get('doc') for row in found['rows']]

    def known(self, ids: Sequence[str]) -> set[str]:
        """Return the ids that have a document, or had one that was deleted."""
        if not ids:
            return set()
        shape = shapes.rows(id=maybe(shapes.text))
        found = self.request('POST', '/_all_docs', body={'keys': list(ids)}, repeat=True, shape=shape)
        return {row['id'] for row in found['rows'] if row.get('id')}

    def id_range(
        self,
        prefix: str,
        *,
        to: str | None = None,
        docs: bool = False,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[Row]:
        """Return the rows of all documents whose id starts with `prefix`, from the primary index.

        `to` is another prefix: return the rows from the first to the second prefix. With `docs`, each row contains its
        `doc`, and rows of documents that were deleted meanwhile are omitted. `limit` is the maximum number of rows, and
        `after` the last id of the previous page.
        """
        params: dict[str, Any] = {
            'startkey': json.dumps(after or prefix),
            'endkey': json.dumps((to or prefix) + '\uffff'),
            'include_docs': docs,
            # With `after`, the first row is that of the previous page, unless its document was deleted meanwhile.
            **({'limit': limit + bool(after)} if limit else {}),
        }
        shape = members(rows=items(shapes.ranged_row))
        try:
            found = cast('list[Row]', self.request('GET', '/_all_docs', params, repeat=True, shape=shape)['rows'])
        except errors.AnswerTooLarge:
            if not docs:
                raise
            found = self._with_docs(self.id_range(prefix, to=to, limit=limit, after=after))
        found = [row for row in found if row['id'] != after][:limit]
        return [row for row in found if row.get('doc')] if docs else found

    def select(
        self,
        selector: Document,
        *,
        limit: int,
        prefix: str = '',
        after: str = '',
        fields: Sequence[str] | None = None,
    ) -> list[Document]:
        """Return the first documents that match a Mango `selector`, in the order of their ids; no design documents.

        `prefix` is the beginning of their ids. CouchDB reads all of these documents after the id `after` until `limit`
        of them match, without an index and without JavaScript: about 15,000 a second (measured with CouchDB 3.5).
        `fields` are the members to return, by default all. CouchDB's bookmarks are not used: a document is left out if
        the last one before it was deleted meanwhile.
        """
        ids = {'$gt': after or prefix, **({'$lt': f'{prefix}\uffff'} if prefix else {})}
        body: Document = {'selector': {**selector, '_id': ids}, 'sort': ['_id'], 'limit': limit}
        if fields is not None:
            body['fields'] = ['_id', *fields]
        shape = members(docs=items(members(_id=shapes.text)))
        return cast('list[Document]', self.request('POST', '/_find', body=body, repeat=True, shape=shape)['docs'])

    # -- views

    def view(self, design: str, view: str, row: Shape = _ANY, **params: Any) -> list[Row]:
        """Return the rows of the view `view` in the design document `design`.

        `params` are CouchDB's query parameters; `key`, `keys`, `startkey` and `endkey` are Python values. With
        `include_docs`, each row contains its current `doc`, or None if it was deleted: these are read in a second
        request.

        *Raises* `BrokenAnswer` if a row does not have the shape `row`, `NotFound` if the view does not exist.
        """
        for name in ('key', 'keys', 'startkey', 'endkey'):
            if name in params:
                params[name] = json.dumps(params[name])
        # A view needs three times as long per document as _bulk_get (0.42 ms, measured on CouchDB 3.5).
        docs = params.pop('include_docs', False)
        if docs:
            row = shapes.both(row, members(id=shapes.text))
        found = cast('list[Row]', self.query(design, 'GET', view, params, shape=members(rows=items(row)))['rows'])
        return self._with_docs(found) if docs else found

    def _with_docs(self, rows: list[Row]) -> list[Row]:
        """Add the documents to the rows: None for a document that was deleted."""
        for row, doc in zip(rows, self.fetch([row['id'] for row in rows]), strict=True):
            row['doc'] = doc
        return rows

    def query(
        self,
        design: str,
        method: str,
        view: str,
        params: Mapping[str, Any] | None,
        body: Any = None,
        *,
        shape: Shape,
    ) -> Any:
        """Send a request to the view `view` in the design document `design`, or to a path below the view.

        *Raises* `IndexNotReady` if the time limit was exceeded while CouchDB builds the index, and `ViewFailed` if the
        view server has failed twice. `failed_views` then counts it, see `queues.quarantine`.
        """
        path = f'/_design/{design}/_view/{view}'
        self.prepare_index(design, view.partition('/')[0])
        try:
            try:
                return self.request(method, path, params, body, repeat=True, shape=shape)
            except errors.ViewFailed:
                return self.request(method, path, params, body, repeat=True, shape=shape)
        except errors.ViewFailed as exc:
            self.failed_views += 1
            raise errors.ViewFailed(
                f'{exc}; one of the documents may be the reason: the workers look for it and set it aside'
            ) from None
        except errors.ServerUnavailable as exc:
            if (
                exc.was_cut
                or exc.status not in (None, 500)
                or not (pending := self.pending_changes(design, if_running=True))
            ):
                raise
            raise errors.IndexNotReady(
                f'{self.address.url}: CouchDB builds the index {design}, and {pending:,} changes remain'
            ) from None

    def prepare_index(self, design: str, view: str) -> None:
        """Called before requests to a view: a subclass may wait here until CouchDB has built the index."""

    def pending_changes(self, design: str, *, if_running: bool = False) -> int:
        """Return how many changes an index lacks; with `if_running`, 0 if CouchDB does not work on it just now."""
        try:
            found = self.request('GET', f'/_design/{design}/_info', timeout=_INFO_SECONDS, shape=shapes.INDEX)
        except errors.CouchDBError:
            return 0
        info = found['view_index']
        return int(info['updates_pending']['total']) if info['updater_running'] or not if_running else 0

    # -- writes

    def put(self, doc: Mapping[str, Any], *, text: bytes | None = None) -> str:
        """Write a document under its `_id` and return the new revision. `text` is the document as JSON, if known.

        *Raises* `Conflict` if the document exists and `_rev` is missing or is not its current revision;
        `DocumentTooLarge`, `Unstorable`, `RequestRefused` if CouchDB cannot store it; `ServerUnavailable` if it is
        unknown whether CouchDB stored it.
        """
        stored = members(id=shapes.equal(doc['_id']), rev=shapes.revision)
        return cast(str, self.request('PUT', path_of(doc['_id']), body=text or doc, shape=stored)['rev'])

    def try_put(self, doc: Mapping[str, Any]) -> str | None:
        """Write a document like `put` and return the new revision; return None on a conflict.

        *Raises* the errors of `put` except `Conflict`.
        """
        try:
            return self.put(doc)
        except errors.Conflict:
            return None

    def bulk(self, docs: Sequence[Mapping[str, Any]], *, texts: Sequence[bytes] | None = None) -> list[WriteResult]:
        """Write many documents and return the result for each, in the same order; some may be stored and others not.

        `texts` are the documents as JSON, if the caller has encoded them. Documents that exceed the size of one request
        are written in several requests.

        If CouchDB refuses a request because of one document (status 413, 400 or 412), the result of that document is
        refused with the error `document_too_large`, `refused` or `missing_stub`, and the others are written. A document
        that cannot be encoded is refused as `unstorable`.

        *Raises* `ServerUnavailable` if CouchDB did not decide about each document; the attribute `answered` of the
        error contains the results of earlier requests.
        """
        return BulkWrite(self).write(docs, texts)

    def create_once(
        self, docs: Sequence[Mapping[str, Any]], *, texts: Sequence[bytes] | None = None
    ) -> list[WriteResult]:
        """Create the documents whose ids were never used, and return a result for each, as `bulk` does.

        An existing document stays unchanged, and a deleted one stays deleted, however late a request arrives. The first
        revision is computed from the id alone and written as replication writes it (`new_edits: false`). CouchDB
        ignores a revision that the document has in its history: the newest 20 revisions, see `queues.databases`, until
        the document is purged (measured on CouchDB 3.5 and PouchDB 9). The result is "stored" in either case. So the
        request is sent again if the connection was cut, and a caller may repeat it after any error.
        """
        docs = [{**doc, '_rev': first_revision(doc['_id'])} for doc in docs]
        if texts is not None:
            texts = [b'{"_rev":"%b",' % doc['_rev'].encode() + text[1:] for doc, text in zip(docs, texts, strict=True)]
        return BulkWrite(self, once=True).write(docs, texts)

    def write_anew(self, doc: Mapping[str, Any], tombstone: Document | None) -> str:
        """Write a document under an id that is free, and return its revision. A late copy of the request does nothing.

        `tombstone` is the deleted leaf that CouchDB shows (see `winning`), or None if the id was never used. CouchDB
        accepts a write without a revision on top of a tombstone, also one that arrives late, and refuses one that names
        the tombstone (measured with CouchDB 3.5). So the revision is made of the document and of the tombstone's, and
        written as replication does it: see `create_once`. It is never in conflict: two processes that write different
        documents at once make two leaves, and the caller must say what that means.
        """
        generation, parent = revision_parts(tombstone['_rev']) if tombstone else (0, '')
        text = md5(encoded([parent, doc]), usedforsecurity=False).hexdigest()
        history = {'start': generation + 1, 'ids': [text, parent] if parent else [text]}
        revision = {**doc, '_rev': f'{generation + 1}-{text}', '_revisions': history}
        [result] = BulkWrite(self, once=True).in_parts([revision], [encoded(revision)])
        if result.is_refused:
            raise result.exception(self.address.url)
        return result.rev

    # -- after a write without a response
    #
    # Sending all of the documents again would show which of them are stored, by conflicts. But a cluster reports a
    # conflict only after every node has reported it or is known to be down: while one node does not respond, that takes
    # a minute (measured with CouchDB 3.5). Reads need responses of a majority of nodes at most.

    def still_writable(self, docs: Sequence[Mapping[str, Any]]) -> list[bool]:
        """Return for each document whether it can still be written.

        A document with a revision can be written if the revision is a leaf; a new one if all leaf revisions are
        deleted. For a consumer, whose documents may have several leaf revisions in a cluster.
        """
        return [
            any(leaf['_rev'] == doc['_rev'] for leaf in leaves)
            if '_rev' in doc
            else all(leaf.get('_deleted') for leaf in leaves)
            for doc, leaves in zip(docs, self.fetch_leaves([doc['_id'] for doc in docs]), strict=True)
        ]

    def still_current(self, docs: Sequence[_Doc]) -> list[_Doc]:
        """Return the documents whose revision is the one that CouchDB shows; new ones if CouchDB shows none.

        For the result backend, which writes over the revision that it remembers.
        """
        found = self.find([doc['_id'] for doc in docs])
        return [doc for doc, now in zip(docs, found, strict=True) if (now or {}).get('_rev') == doc.get('_rev')]

    # -- changes

    def sequence(self) -> Any:
        """Return the database's current update sequence, the argument `since` of `changes.read`; one request.

        The response also contains the number of copies: update `replicas`.
        """
        info = self.info(members(update_seq=shapes.sequence))
        self._learn_replicas(info)
        return info['update_seq']

    # -- the database

    def info(self, shape: Shape = _ANY) -> Document:
        """Return CouchDB's information about the database: sizes, counts, update sequence (`GET /{db}`)."""
        return cast(Document, self.request('GET', '', repeat=True, shape=shape))

    def is_cluster(self) -> bool:
        """Return whether several nodes store each document; one request and `replicas` at the first call."""
        if not self._knows_replicas:
            self._learn_replicas(self.info())
        return self.replicas > 1

    def _learn_replicas(self, info: Document) -> None:
        """Set `replicas` from a response of `info`."""
        copies = info['cluster'].get('n') if isinstance(info.get('cluster'), dict) else None
        self.replicas, self._knows_replicas = copies if isinstance(copies, int) else 1, True

    def create(self) -> None:
        """Create the database if it does not exist; *raises* `AccessDenied`."""
        try:
            self.request('PUT', '')
        except errors.Conflict:
            pass  # it exists: 412

    def delete(self) -> None:
        """Delete the database with all its documents."""
        self.request('DELETE', '')


def winning(leaves: Sequence[Document]) -> Document | None:
    """Return the leaf that CouchDB shows: not deleted, then the longest history, then the largest revision."""
    return max(leaves, key=lambda leaf: (not leaf.get('_deleted'), *revision_parts(leaf['_rev'])), default=None)
