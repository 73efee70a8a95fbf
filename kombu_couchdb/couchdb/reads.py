"""Reads of one CouchDB database: documents by their ids, leaf revisions, and rows of views."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, cast
from urllib.parse import quote

from .. import errors
from .address import Address
from .http import Http
from .shapes import DOCUMENT, Shape, both, document, equal, exactly, items, maybe, members, revision, rows, text
from .unusable import Unusable

__all__ = ['Document', 'Reads', 'Row', 'path_of']

#: A document or a part of one.
Document = dict[str, Any]

#: A row of a view or of `_all_docs`: `id`, `key`, `value`, and `doc` if documents were asked for.
Row = dict[str, Any]

_result = members(id=text, docs=items(members()))

#: Any row, and one with its document.
_ROW, _WITH_DOC = members(), members(id=text, doc=maybe(DOCUMENT))

#: Errors of one document for which the other documents of the request are read without it.
_APART_IF = (errors.NestedTooDeeply, errors.AnswerTooLarge)

#: From this many rows on, documents are read in a request of their own, after the rows of their view.
_APART = 10


class Reads(Http):
    """Reads one database; *every* method raises the errors of `kombu_couchdb.errors`."""

    def __init__(self, address: Address, request_timeout: float = 8.0, connect_timeout: float = 4.0) -> None:
        super().__init__(address, request_timeout, connect_timeout)
        #: Documents that cannot be read, or not be written back.
        self.unusable = Unusable()

    def raw(self, doc_id: str) -> bytes:
        """Return a document as the JSON text that CouchDB has of it, which need not be such that Python can read it."""
        return self._exchange('GET', path_of(doc_id), repeat=True)[0].strip()

    def rev(self, doc_id: str) -> str | None:
        """Return the revision of a document, None if there is none, though the document cannot be read."""
        found = self.request('POST', '/_all_docs', body={'keys': [doc_id]}, repeat=True, shape=_REVS)['rows'][0].get(
            'value'
        )
        return found['rev'] if found and not found.get('deleted') else None

    def get(self, doc_id: str, **params: Any) -> Document:
        """Return a document; *raises* `NotFound`."""
        return cast(Document, self.request('GET', path_of(doc_id), params, repeat=True, shape=document(doc_id)))

    def get_or_none(self, doc_id: str) -> Document | None:
        """Return a document, None if there is none."""
        try:
            return self.get(doc_id)
        except errors.NotFound:
            return None

    def fetch(self, ids: Sequence[str], **params: Any) -> list[Document | None]:
        """Return the documents with these ids in this order, None where one is there no more; if it ever was, see `find`."""
        try:
            leaves = self.fetch_leaves(ids, **params)
        except _APART_IF as exc:
            return self._apart(lambda part: self.fetch(part, **params), ids, exc)
        found = {
            doc_id: found[0] if found and not found[0].get('_deleted') else None
            for doc_id, found in zip(ids, leaves, strict=True)
        }
        conflicted = list(dict.fromkeys(doc_id for doc_id, found in zip(ids, leaves, strict=True) if len(found) > 1))
        found.update(zip(conflicted, self._winners(conflicted), strict=True))
        return [found[doc_id] for doc_id in ids]

    def find(self, ids: Sequence[str]) -> list[Document | None]:
        """Return the documents with these ids in this order, None where there is none; for what may never have been there.

        Asked by `fetch` for such a document, a cluster answers only when every node has said that it has none, or is known to be
        down: while one is silent that takes a minute (measured with CouchDB 3.5). This needs a majority, or less.
        """
        try:
            if len(ids) == 1:
                return [self.get_or_none(ids[0])]
            return self._winners(ids) if ids and self.is_cluster() else self.fetch(ids)
        except _APART_IF as exc:
            return self._apart(self.find, ids, exc)

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
        return [answer['ok'] for answer in found if answer.get('ok')]

    def fetch_leaves(self, ids: Sequence[str], **params: Any) -> list[list[Document]]:
        """Return all leaves of the documents with these ids, deleted ones too, in this order; see `leaves`. One request."""
        if not ids:
            return []
        # Less than half as dear as _all_docs (0.13 and 0.3 ms a document, measured on CouchDB 3.5).
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
            raise errors.BrokenAnswer(f'{self.address.url}: a broken answer to POST /_bulk_get')
        return [leaves[doc_id] for doc_id in ids]

    def _apart(
        self, read: Callable[[Sequence[str]], list[Document | None]], ids: Sequence[str], exc: errors.CouchDBError
    ) -> list[Document | None]:
        """Read documents in parts that are too large together, or of which one cannot be read.

        That one is left alone, as if it were not there, and stops no other.
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
        error = found.get('error') or {'error': 'not_found'}  # the embedded server says nothing at all then
        if error.get('error') == 'not_found':
            return None
        raise errors.from_answer(error, self.address.url)

    def _winners(self, ids: Sequence[str]) -> list[Document | None]:
        if not ids:
            return []
        shape = members(rows=exactly(*(members(key=equal(doc_id), doc=maybe(document(doc_id))) for doc_id in ids)))
        found = self.request(
            'POST', '/_all_docs', {'include_docs': True}, {'keys': list(ids)}, repeat=True, shape=shape
        )
        return [row.get('doc') for row in found['rows']]

    def known(self, ids: Sequence[str]) -> set[str]:
        """Return those of these ids under which there is a document, or was one that has been deleted."""
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
        """Return the rows of all documents whose id starts with `prefix`, read from the primary index.

        With `to`, another prefix, all from the first to the second. With `docs` each row has its `doc`; one whose document is
        gone by now is left out. With `limit` and `after`, the last id of an earlier read, it is a page of them.
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
        except _APART_IF:
            if not docs:
                raise
            found = self._with_docs(self.id_range(prefix, to=to, limit=limit, after=after))
        return [row for row in found if row.get('doc')] if docs else found

    def view(self, design: str, view: str, row: Shape = _ROW, **params: Any) -> list[Row]:
        """Return the rows of a view, each of the shape `row`. `startkey`, `endkey` and `key` are Python values.

        With `include_docs` each row has its `doc` as it is now, None if it is gone: many of them in a second request.
        """
        for name in ('key', 'keys', 'startkey', 'endkey'):
            if name in params:
                params[name] = json.dumps(params[name])
        if params.get('include_docs'):
            row = both(row, _WITH_DOC)
        # A view takes three times as long for each document as _bulk_get does (0.42 ms, measured on CouchDB 3.5).
        apart = params.get('include_docs') and params.get('limit', _APART) >= _APART
        if apart:
            del params['include_docs']
        path, shape = f'/_design/{design}/_view/{view}', members(rows=items(row))
        try:
            answer = self.request('GET', path, params, repeat=True, shape=shape)
        except errors.NestedTooDeeply:
            if not params.pop('include_docs', False):
                raise
            apart, answer = True, self.request('GET', path, params, repeat=True, shape=shape)
        found = cast('list[Row]', answer['rows'])
        return self._with_docs(found) if apart else found

    def _with_docs(self, rows: list[Row]) -> list[Row]:
        """Return rows with their documents, None for those that are gone or cannot be read."""
        for row, doc in zip(rows, self.fetch([row['id'] for row in rows]), strict=True):
            row['doc'] = doc
        return rows

    def info(self, shape: Shape = members()) -> Document:  # noqa: B008
        """Return what CouchDB tells of the database."""
        info = cast(Document, self.request('GET', '', repeat=True, shape=shape))
        copies = info['cluster'].get('n') if isinstance(info.get('cluster'), dict) else None
        self.replicas, self._informed = copies if isinstance(copies, int) else 1, True
        return info

    def is_cluster(self) -> bool:
        """Tell whether several nodes keep each document; one request, if nobody has asked yet."""
        if not self._informed:
            self.info()
        return self.replicas > 1


def path_of(doc_id: str) -> str:
    """Return the path of a document below its database."""
    # The slash after _design is part of the path: CouchDB redirects if it is encoded.
    prefix, slash, name = doc_id.partition('/') if doc_id.startswith(('_design/', '_local/')) else ('', '', doc_id)
    # Clients, proxies and servers resolve '.' and '..' in a path unless the dots are encoded.
    quoted = name.replace('.', '%2E') if name in ('.', '..') else quote(name, safe='')
    return f'/{prefix}{slash}{quoted}'


_REVS = members(rows=exactly(members(value=maybe(members(rev=revision)))))

_row = members(id=text, value=members(rev=revision))


def _ranged(row: Any) -> bool:
    """A row of `_all_docs`, with its own document if it has one."""
    return _row(row) and maybe(document(row['id']))(row.get('doc'))


def _found(result: Any) -> bool:
    """The answer for one document of `_bulk_get`: all its leaves, or an error; from the embedded server also neither."""

    def leaf(found: Any) -> bool:
        return is_its(found) if isinstance(found, dict) and 'ok' in found else is_none(found)

    if not _result(result):
        return False
    is_its, is_none = members(ok=document(result['id'])), members(error=maybe(members()))
    return bool(result['docs']) and all(map(leaf, result['docs']))
