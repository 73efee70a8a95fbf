"""Reads of one CouchDB database: documents by id, leaf revisions, rows of views, and information about the database."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, cast
from urllib.parse import quote

from .. import errors
from . import views
from .address import Address
from .failures import from_answer
from .http import Http
from .shapes import DOCUMENT, Shape, both, document, equal, exactly, items, maybe, members, revision, rows, text
from .unusable import Unusable

__all__ = ['Document', 'Reads', 'Row', 'path_of']

#: A document or a part of one.
Document = dict[str, Any]

#: A row of a view or of `_all_docs`: `id`, `key`, `value`, and `doc` if the request includes documents.
Row = dict[str, Any]

_result = members(id=text, docs=items(members()))

#: The shapes of any row, and of a row with its document.
_ROW, _WITH_DOC = members(), members(id=text, doc=maybe(DOCUMENT))

#: After these errors the documents of a request are read in several requests, see `_fetch_in_parts`.
_READ_IN_PARTS = (errors.NestedTooDeeply, errors.AnswerTooLarge)

#: From this limit of rows on, the documents of a view's rows are read in a second request.
_SEPARATE_DOCS_FROM_ROWS = 10


class Reads(Http):
    """Reads of one database. *Every* method raises the errors of `kombu_couchdb.errors`."""

    def __init__(self, address: Address, request_timeout: float = 8.0, connect_timeout: float = 4.0) -> None:
        super().__init__(address, request_timeout, connect_timeout)
        #: Documents that cannot be read or written.
        self.unusable = Unusable()
        #: The number of nodes that store each document; 1 on a single node. It is 1, too, until the first call of
        #: `is_cluster`, of `find` with several ids, or of `Client.sequence`, which consumers call when they start.
        self.replicas = 1
        self._knows_replicas = False

    def raw(self, doc_id: str) -> bytes:
        """Return a document as CouchDB's JSON text; *raises* `NotFound`. Python may be unable to decode the text."""
        return self._exchange('GET', path_of(doc_id), repeat=True)[0].strip()

    def rev(self, doc_id: str) -> str | None:
        """Return the revision of a document, even if it cannot be decoded; None if it does not exist."""
        [row] = self.request('POST', '/_all_docs', body={'keys': [doc_id]}, repeat=True, shape=_REVS)['rows']
        found = row.get('value')
        return found['rev'] if found and not found.get('deleted') else None

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
        try:
            leaves = self.fetch_leaves(ids, **params)
        except _READ_IN_PARTS as exc:
            return self._fetch_in_parts(lambda part: self.fetch(part, **params), ids, exc)
        found = {
            doc_id: found[0] if found and not found[0].get('_deleted') else None
            for doc_id, found in zip(ids, leaves, strict=True)
        }
        conflicted = list(dict.fromkeys(doc_id for doc_id, found in zip(ids, leaves, strict=True) if len(found) > 1))
        found.update(zip(conflicted, self._winners(conflicted), strict=True))
        return [found[doc_id] for doc_id in ids]

    def find(self, ids: Sequence[str]) -> list[Document | None]:
        """Return the documents with these ids, in this order; None if the document does not exist, or never existed.

        If a document never existed, a cluster responds to `fetch` only after every node has reported that, or is known
        to be down: while one node does not respond, that takes a minute (measured with CouchDB 3.5). `find` needs
        responses of a majority of nodes at most.
        """
        try:
            if len(ids) == 1:
                return [self.get_or_none(ids[0])]
            return self._winners(ids) if ids and self.is_cluster() else self.fetch(ids)
        except _READ_IN_PARTS as exc:
            return self._fetch_in_parts(self.find, ids, exc)

    def leaves(self, doc_id: str, **params: Any) -> list[Document]:
        """Return all leaf revisions of a document, deleted ones included; an empty list if it never existed."""
        try:
            found = self.request(
                'GET',
                path_of(doc_id),
                {'open_revs': 'all', **params},
                repeat=True,
                shape=items(members(ok=maybe(document(doc_id)))),
            )
        except errors.NotFound:
            return []
        return [leaf['ok'] for leaf in found if leaf.get('ok')]

    def fetch_leaves(self, ids: Sequence[str], **params: Any) -> list[list[Document]]:
        """Return a list of `leaves` for each of these ids, in this order; one request."""
        if not ids:
            return []
        # _bulk_get needs less than half the time of _all_docs (0.13 and 0.3 ms per document, measured on CouchDB 3.5).
        wanted = list(dict.fromkeys(ids))
        results = self.request(
            'POST',
            '/_bulk_get',
            params,
            {'docs': [{'id': doc_id} for doc_id in wanted]},
            repeat=True,
            shape=members(results=items(_found)),
        )['results']
        leaves = {result['id']: [leaf for found in result['docs'] if (leaf := self._leaf(found))] for result in results}
        if leaves.keys() != set(ids):
            raise errors.BrokenAnswer(f'{self.address.url}: unexpected response to POST /_bulk_get')
        return [leaves[doc_id] for doc_id in ids]

    def _fetch_in_parts(
        self, read: Callable[[Sequence[str]], list[Document | None]], ids: Sequence[str], exc: errors.CouchDBError
    ) -> list[Document | None]:
        """Read documents in several requests after an error: together they are too large, or one cannot be decoded.

        The result for a document that cannot be decoded is None, so that the others can be read.
        """
        if len(ids) == 1:
            if not isinstance(exc, errors.NestedTooDeeply):
                raise exc
            self.unusable.note(ids[0], None, str(exc))
            return [None]
        others = [doc_id for doc_id in ids if not self.unusable.is_unread(doc_id)]
        if len(others) < len(ids):
            found = dict(zip(others, read(others), strict=True))
            return [found.get(doc_id) for doc_id in ids]
        return [*read(ids[: len(ids) // 2]), *read(ids[len(ids) // 2 :])]

    def _leaf(self, found: Document) -> Document | None:
        if 'ok' in found:
            return cast(Document, found['ok'])
        error = found.get('error') or {'error': 'not_found'}  # the embedded server returns an empty object
        if error.get('error') == 'not_found':
            return None
        raise from_answer(error, self.address.url)

    def _winners(self, ids: Sequence[str]) -> list[Document | None]:
        if not ids:
            return []
        shape = members(rows=exactly(*(members(key=equal(doc_id), doc=maybe(document(doc_id))) for doc_id in ids)))
        found = self.request(
            'POST', '/_all_docs', {'include_docs': True}, {'keys': list(ids)}, repeat=True, shape=shape
        )
        return [row.get('doc') for row in found['rows']]

    def known(self, ids: Sequence[str]) -> set[str]:
        """Return the ids that have a document, or had one that was deleted."""
        if not ids:
            return set()
        found = self.request('POST', '/_all_docs', body={'keys': list(ids)}, repeat=True, shape=rows(id=maybe(text)))
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
            **({'limit': limit} if limit else {}),
            **({'skip': 1} if after else {}),
        }
        shape = members(rows=items(_ranged))
        try:
            found = cast('list[Row]', self.request('GET', '/_all_docs', params, repeat=True, shape=shape)['rows'])
        except _READ_IN_PARTS:
            if not docs:
                raise
            found = self._with_docs(self.id_range(prefix, to=to, limit=limit, after=after))
        return [row for row in found if row.get('doc')] if docs else found

    def view(self, design: str, view: str, row: Shape = _ROW, **params: Any) -> list[Row]:
        """Return the rows of the view `view` in the design document `design`.

        `params` are CouchDB's query parameters; `key`, `keys`, `startkey` and `endkey` are Python values. With
        `include_docs`, each row contains its current `doc`, or None if it was deleted. The documents of many rows are
        read in a second request.

        *Raises* `BrokenAnswer` if a row does not have the shape `row`, `NotFound` if the view does not exist.
        """
        for name in ('key', 'keys', 'startkey', 'endkey'):
            if name in params:
                params[name] = json.dumps(params[name])
        if params.get('include_docs'):
            row = both(row, _WITH_DOC)
        # A view needs three times as long per document as _bulk_get (0.42 ms, measured on CouchDB 3.5).
        separate = (
            params.get('include_docs') and params.get('limit', _SEPARATE_DOCS_FROM_ROWS) >= _SEPARATE_DOCS_FROM_ROWS
        )
        if separate:
            del params['include_docs']
        shape = members(rows=items(row))
        try:
            response = views.query(self, design, 'GET', view, params, shape=shape)
        except errors.NestedTooDeeply:
            if not params.pop('include_docs', False):
                raise
            separate, response = True, views.query(self, design, 'GET', view, params, shape=shape)
        found = cast('list[Row]', response['rows'])
        return self._with_docs(found) if separate else found

    def _with_docs(self, rows: list[Row]) -> list[Row]:
        """Add the documents to the rows: None for a document that was deleted or cannot be decoded."""
        for row, doc in zip(rows, self.fetch([row['id'] for row in rows]), strict=True):
            row['doc'] = doc
        return rows

    def info(self, shape: Shape = members()) -> Document:  # noqa: B008
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


def path_of(doc_id: str) -> str:
    """Return the path of a document, relative to the URL of its database."""
    # CouchDB redirects the request if the slash after _design is encoded.
    prefix, slash, name = doc_id.partition('/') if doc_id.startswith(('_design/', '_local/')) else ('', '', doc_id)
    # Clients, proxies and servers resolve '.' and '..' in a path unless the dots are encoded.
    quoted = name.replace('.', '%2E') if name in ('.', '..') else quote(name, safe='')
    return f'/{prefix}{slash}{quoted}'


_REVS = members(rows=exactly(members(value=maybe(members(rev=revision)))))

_row = members(id=text, value=members(rev=revision))


def _ranged(row: Any) -> bool:
    """Shape of a row of `_all_docs`; a document in it has the id of the row."""
    return _row(row) and maybe(document(row['id']))(row.get('doc'))


def _found(result: Any) -> bool:
    """Shape of the result for a document of `_bulk_get`: leaf revisions, an error, or (embedded server) neither."""

    def leaf(found: Any) -> bool:
        return has_id(found) if isinstance(found, dict) and 'ok' in found else is_missing(found)

    if not _result(result):
        return False
    has_id, is_missing = members(ok=document(result['id'])), members(error=maybe(members()))
    return bool(result['docs']) and all(map(leaf, result['docs']))
