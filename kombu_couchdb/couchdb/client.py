"""The client of one CouchDB database: reads and writes, and also the changes feed and the database itself."""

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

#: Sorts after every string and number in the key of a view.
LAST: dict[str, Any] = {}

#: The shape of the response to `_changes`.
CHANGES = members(
    results=items(members(id=text, changes=exactly(members(rev=revision)), doc=maybe(DOCUMENT))), last_seq=sequence
)


class Client(Bulk):
    """Requests to one database. Durations are seconds. *Every* method raises the errors of `kombu_couchdb.errors`."""

    def beside(self, database: str) -> Client:
        """Return a client for another database on the same server, with the same user and time limits."""
        others = tuple(replace(other, database=database) for other in self.address.others)
        return Client(replace(self.address, database=database, others=others), *reversed(self.timeouts))

    def extend(self, doc_id: str, text: bytes, members: Document) -> str:
        """Append `members` to a document, whose JSON `text` comes from `raw`, and write it; return the new revision.

        CouchDB keeps the last of two members with one name.

        *Raises* `Conflict` if the document has changed since it was read.
        """
        return self.put({'_id': doc_id}, text=text[:-1] + b',' + encoded(members)[1:])

    def sequence(self) -> Any:
        """Return the database's current update sequence, the argument `since` of `changes`; one request.

        The response also contains the number of copies: update `replicas`.
        """
        info = self.info(members(update_seq=sequence))
        self._learn_replicas(info)
        return info['update_seq']

    def changes(self, since: Any, body: Document, limit: int, *, docs: bool = True) -> Document:
        """Return the changes after `since` as `{'results', 'last_seq'}`, without waiting.

        `body`, `limit` and `docs` are those of `open_changes`. Documents that cannot be decoded are None in their rows.
        """
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
        self, since: Any, body: Document, limit: int, heartbeat: float, *, docs: bool = True
    ) -> requests.Response:
        """Send a longpoll request to `_changes` and return its response without reading the body.

        The response ends with the first change after `since` that matches the filter in `body`: `{'selector': …}` or
        `{'doc_ids': […]}`, both native in the server and cheap, or empty for any change. It contains at most `limit`
        changes, with their documents if `docs` is true. CouchDB sends an empty line every `heartbeat` seconds.
        """
        params: dict[str, Any] = {
            'feed': 'longpoll',
            'since': since,
            'include_docs': docs,
            'limit': limit,
            'heartbeat': int(heartbeat * 1000),
        }
        if body:
            params['filter'] = f'_{next(iter(body))}'
        return self._send('POST', '/_changes', params, body, heartbeat * 2 + 2, bounds=Bounds(longpoll=True))

    def welcome(self) -> Document:
        """Return CouchDB's response to `GET /`; *raises* `NotCouchDB` if another service responds."""
        try:
            greeting = self.request('GET', None, repeat=True, shape=lambda response: True)
        except (errors.NotFound, errors.RequestRefused):
            greeting = None
        if not isinstance(greeting, dict) or not ({'couchdb', 'express-pouchdb'} & set(greeting)):
            raise errors.NotCouchDB(
                f'{self.address.server} responds, but is not a CouchDB server; check host and port in the URL'
            )
        return greeting

    def create(self) -> None:
        """Create the database if it does not exist; *raises* `AccessDenied`."""
        try:
            self.request('PUT', '')
        except errors.Conflict:
            pass  # it exists: 412

    def delete(self) -> None:
        """Delete the database with all its documents."""
        self.request('DELETE', '')


def chunks(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    """Yield `items` in slices of at most `size`."""
    return (items[i : i + size] for i in range(0, len(items), size))
