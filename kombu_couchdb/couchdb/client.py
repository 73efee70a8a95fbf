"""The client of one CouchDB database. This folder knows CouchDB's protocol and nothing of queues."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import requests

from .. import errors
from .bounds import Bounds
from .bulk import Bulk
from .http import encoded
from .reads import Document, Row, path_of
from .shapes import DOCUMENT, exactly, items, maybe, members, revision, sequence, text

__all__ = ['CHANGES', 'LAST', 'Client', 'Document', 'Row', 'chunks', 'path_of']

#: Sorts after every string and number in a view's key.
LAST: dict[str, Any] = {}

#: The shape of the response to `_changes`.
CHANGES = members(
    results=items(members(id=text, changes=exactly(members(rev=revision)), doc=maybe(DOCUMENT))), last_seq=sequence
)


class Client(Bulk):
    """One database. Durations are seconds; *every* method raises the errors of `kombu_couchdb.errors`."""

    def beside(self, database: str) -> Client:
        """Return a client for another database on the same server, for the same user and with the same time limits."""
        others = tuple(replace(other, database=database) for other in self.address.others)
        return Client(replace(self.address, database=database, others=others), *reversed(self.timeouts))

    def extend(self, doc_id: str, text: bytes, members: Document) -> str:
        """Write a document as `raw` returned it, with more members behind it: of two of one name CouchDB keeps the last.

        Return the new revision; *raises* `Conflict`.
        """
        return self.put({'_id': doc_id}, text=text[:-1] + b',' + encoded(members)[1:])

    def sequence(self) -> Any:
        """Return the point in `_changes` at which the database stands now."""
        return self.info(members(update_seq=sequence))['update_seq']

    def changes(self, since: Any, body: Document, limit: int, *, docs: bool = True) -> Document:
        """Return `{'results', 'last_seq'}` of the changes after `since`, without waiting; see `open_changes`."""
        params = {
            'since': since,
            'include_docs': docs,
            'limit': limit,
            **({'filter': f'_{next(iter(body))}'} if body else {}),
        }
        try:
            return cast(Document, self.request('POST', '/_changes', params, body, repeat=True, shape=CHANGES))
        except errors.NestedTooDeeply:
            if not docs:
                raise
            found = self.changes(since, body, limit, docs=False)
            for row in self._with_docs(found['results']):
                if row.get('deleted'):
                    row['doc'] = {'_id': row['id'], '_rev': row['changes'][0]['rev'], '_deleted': True}
            return found

    def open_changes(
        self, since: Any, body: Document, limit: int, beat: float, *, docs: bool = True
    ) -> requests.Response:
        """Open a longpoll on `_changes` that sends an empty line every `beat` seconds, and return it unread.

        The answer ends with the first change that the filter in `body` admits: `{'selector': …}` or `{'doc_ids': […]}`, both
        native in the server and cheap; any change, if it is empty. Its documents are included if `docs` is true.
        """
        params: dict[str, Any] = {
            'feed': 'longpoll',
            'since': since,
            'include_docs': docs,
            'limit': limit,
            'heartbeat': int(beat * 1000),
        }
        if body:
            params['filter'] = f'_{next(iter(body))}'
        return self._send('POST', '/_changes', params, body, beat * 2 + 2, bounds=Bounds(longpoll=True))

    def welcome(self) -> Document:
        """Return the server's greeting; *raises* `NotCouchDB` if something else listens there."""
        try:
            greeting = self.request('GET', None, repeat=True, shape=lambda answer: True)
        except (errors.NotFound, errors.RequestRefused):
            greeting = None
        if not isinstance(greeting, dict) or not ({'couchdb', 'express-pouchdb'} & set(greeting)):
            raise errors.NotCouchDB(f'{self.address.server} answers, but is not a CouchDB server; check host and port')
        return greeting

    def create(self) -> None:
        """Create the database, if it does not exist; *raises* `AccessDenied`."""
        try:
            self.request('PUT', '')
        except errors.Conflict:
            pass  # it exists: 412

    def delete(self) -> None:
        """Delete the database with all that is in it."""
        self.request('DELETE', '')


def chunks(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    """Yield `items` in slices of at most `size`."""
    return (items[i : i + size] for i in range(0, len(items), size))
