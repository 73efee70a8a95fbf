"""HTTP to one CouchDB database: JSON in, JSON out, one pool of connections, every error one of ours.

This module knows CouchDB's protocol and nothing of queues. A client may be used from many threads; after a fork the
child gets connections of its own.
"""

from __future__ import annotations

import json
import os
import threading
import time
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast
from urllib.parse import quote, urlencode

import requests
from kombu.utils.json import JSONEncoder
from requests.adapters import HTTPAdapter

from . import errors
from .address import Address
from .clock import ServerClock

__all__ = ['LAST', 'Client', 'Document', 'Row', 'chunks']

#: A document or a part of one.
Document = dict[str, Any]
#: A row of a view or of `_all_docs`: `id`, `key`, `value`, and `doc` if documents were asked for.
Row = dict[str, Any]

#: Sorts after every string and number in a view's key.
LAST: dict[str, Any] = {}

#: The errors in an answer to `_bulk_docs` that are the server's decision; any other is its trouble.
_DECIDED = frozenset({'conflict', 'forbidden', 'unauthorized', 'document_too_large'})

#: Connections kept open. More may be open at once; those above this are closed after use.
_POOL = 16


class Client:
    """One database. Times are seconds; *every* method raises the errors of `kombu_couchdb.errors`."""

    def __init__(self, address: Address, request_timeout: float = 8.0, connect_timeout: float = 4.0) -> None:
        self.address = address
        self.clock = ServerClock()
        self._timeout = (connect_timeout, request_timeout)
        self._lock = threading.Lock()
        self._pid = 0
        self._headers = {'Accept': 'application/json', 'Content-Type': 'application/json', 'User-Agent': 'celery-couchdb'}
        if address.user:
            secret = f'{address.user}:{address.password or ""}'.encode()
            self._headers['Authorization'] = f'Basic {b64encode(secret).decode("ascii")}'

    # -- documents

    def get(self, doc_id: str, **params: Any) -> Document:
        """Return a document; *raises* `NotFound`."""
        return cast(Document, self.request('GET', _path(doc_id), params, repeat=True))

    def put(self, doc: Document) -> str:
        """Write a document under its `_id` and return the new revision; *raises* `Conflict`."""
        return cast(str, self.request('PUT', _path(doc['_id']), body=doc)['rev'])

    def bulk(self, docs: Sequence[Document], *, repeat: bool = False) -> list[Document]:
        """Write many documents in one request and return CouchDB's answer for each, in the same order.

        An answer is `{'ok': true, 'id', 'rev'}`, with `accepted` where a cluster stored it on too few nodes to prove
        anything, or `{'id', 'error', 'reason'}`. Some may be stored and others not. *Raises* `ServerUnavailable` also if
        the server could not say so of each. With `repeat` a cut connection is tried once more, as for reads.
        """
        answers = self.request('POST', '/_bulk_docs', body={'docs': docs}, repeat=repeat)
        if not isinstance(answers, list) or len(answers) != len(docs):
            raise errors.ServerUnavailable(f'{self.address.url}: a broken answer to _bulk_docs')
        for answer in answers:
            if answer.get('error', 'conflict') not in _DECIDED:
                raise errors.ServerUnavailable(f'{self.address.url}: {answer["error"]}: {answer.get("reason")}')
        return answers

    def fetch(self, ids: Sequence[str]) -> list[Document | None]:
        """Return the documents with these ids in this order, None where one does not exist (any more)."""
        if not ids:
            return []
        rows = self.request('POST', '/_all_docs', {'include_docs': True}, {'keys': list(ids)}, repeat=True)['rows']
        return [row.get('doc') for row in rows]

    def known(self, ids: Sequence[str]) -> set[str]:
        """Return those of these ids under which there is a document, or was one that has been deleted."""
        if not ids:
            return set()
        rows = self.request('POST', '/_all_docs', body={'keys': list(ids)}, repeat=True)['rows']
        return {row['id'] for row in rows if 'id' in row}

    def id_range(self, prefix: str, *, docs: bool = False) -> list[Row]:
        """Return the rows of all documents whose id starts with `prefix`, read from the primary index."""
        params = {'startkey': json.dumps(prefix), 'endkey': json.dumps(prefix + '\uffff'), 'include_docs': docs}
        return cast('list[Row]', self.request('GET', '/_all_docs', params, repeat=True)['rows'])

    # -- views and changes

    def view(self, design: str, view: str, **params: Any) -> list[Row]:
        """Return the rows of a view. `startkey`, `endkey` and `key` are Python values."""
        for name in ('key', 'startkey', 'endkey'):
            if name in params:
                params[name] = json.dumps(params[name])
        return cast('list[Row]', self.request('GET', f'/_design/{design}/_view/{view}', params, repeat=True)['rows'])

    def sequence(self) -> Any:
        """Return the point in `_changes` at which the database stands now."""
        return self.request('GET', '', repeat=True)['update_seq']

    def changes(self, since: Any, body: Document, limit: int, *, docs: bool = True) -> Document:
        """Return `{'results', 'last_seq'}` of the changes after `since`, without waiting; see `open_changes`."""
        params = {'since': since, 'include_docs': docs, 'limit': limit, **({'filter': f'_{next(iter(body))}'} if body else {})}
        return cast(Document, self.request('POST', '/_changes', params, body, repeat=True))

    def open_changes(self, since: Any, body: Document, limit: int, beat: float, *, docs: bool = True) -> requests.Response:
        """Open a longpoll on `_changes` that sends an empty line every `beat` seconds, and return it unread.

        The answer ends with the first change that the filter in `body` admits: `{'selector': …}` or `{'doc_ids': […]}`, both
        native in the server and cheap; any change, if it is empty. Its documents are included if `docs` is true.
        """
        params: dict[str, Any] = {'feed': 'longpoll', 'since': since, 'include_docs': docs, 'limit': limit,
                                  'heartbeat': int(beat * 1000)}
        if body:
            params['filter'] = f'_{next(iter(body))}'
        return self._send('POST', '/_changes', params, body, beat * 2 + 2, stream=True)

    # -- the database

    def welcome(self) -> Document:
        """Return the server's greeting; *raises* `NotCouchDB` if something else listens there."""
        try:
            greeting = self.request('GET', None, repeat=True)
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

    def close(self) -> None:
        """Close the idle connections; the client can still be used."""
        with self._lock:
            if self._pid == os.getpid():
                self._adapter.close()
            self._pid = 0

    # -- HTTP

    def request(self, method: str, path: str | None, params: Mapping[str, Any] | None = None, body: Any = None,
                *, repeat: bool = False) -> Any:
        """Send one request below the database (or, with path None, to the server's root) and return its JSON.

        With `repeat`, for reads, a connection that was cut before the answer is tried once more: a server or proxy
        may close an idle connection at the very moment it is used again.
        """
        try:
            response = self._send(method, path, params, body)
        except errors.ServerUnavailable as exc:
            if not repeat or not isinstance(exc.__cause__, requests.ConnectionError) \
                    or isinstance(exc.__cause__, requests.Timeout):
                raise
            response = self._send(method, path, params, body)
        try:
            text = response.content
        except requests.RequestException as exc:
            raise errors.from_transport(exc, self.address.url) from exc
        return self.decode(text, response.status_code)

    def decode(self, text: bytes, status: int = 200) -> Any:
        """Return the JSON in an answer; *raises* `ServerUnavailable` if it was cut, `NotCouchDB` if it is none."""
        try:
            return json.loads(text)
        except RecursionError as exc:
            raise errors.RequestRefused(f'{self.address.url}: a document is nested too deeply to be read') from exc
        except ValueError as exc:
            if text.lstrip()[:1] in (b'{', b'['):
                raise errors.ServerUnavailable(f'{self.address.url}: the answer was cut off') from exc
            raise errors.NotCouchDB(
                f'{self.address.server} answers {status} without JSON: not a CouchDB server; check host and port') from exc

    def _send(self, method: str, path: str | None, params: Mapping[str, Any] | None, body: Any,
              read_timeout: float | None = None, *, stream: bool = False) -> requests.Response:
        prepared = requests.PreparedRequest()
        prepared.method = method
        prepared.url = (self.address.server + '/' if path is None else self.address.url + path) + _query(params)
        prepared.headers = self._headers.copy()  # type: ignore[assignment]
        prepared.body = None
        size = 0
        if body is not None:
            data = json.dumps(body, separators=(',', ':'), cls=JSONEncoder).encode('utf-8')
            size = len(data)
            prepared.body = data
            prepared.headers['Content-Length'] = str(size)
        elif method in ('PUT', 'POST'):
            prepared.headers['Content-Length'] = '0'
        timeout = (self._timeout[0], read_timeout or self._timeout[1])
        adapter, settings = self._connected()
        sent = time.time()
        try:
            response = adapter.send(prepared, stream=stream, timeout=timeout, **settings)
            if not stream or response.status_code >= 400:
                response.content  # noqa: B018 - read the body, so that the connection returns to the pool
        except (OSError, ValueError) as exc:  # requests' errors are OSErrors; urllib3 has a ValueError for impossible hosts
            raise errors.from_transport(exc, self.address.url) from exc
        self.clock.observe(response.headers.get('Date'), sent, time.time())
        # _bulk_docs answers 500 with the usual list when some nodes of a cluster are down: the list tells more.
        if response.status_code >= 400 and not (response.status_code == 500 and response.content[:1] == b'['):
            raise errors.from_status(response, self.address.url, self.address.user, size)
        if 300 <= response.status_code < 400:
            raise errors.NotCouchDB(f'{self.address.server} redirects to another address; use that one in the URL')
        return response

    def _connected(self) -> tuple[HTTPAdapter, dict[str, Any]]:
        """Return the connection pool of this process and what the environment says of proxies and certificates."""
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    # Session.send() would read the environment and the cookies for every request: once is enough.
                    session = requests.Session()
                    found = session.merge_environment_settings(
                        self.address.url, {}, False, self.address.verify, self.address.cert)
                    self._settings = {name: found[name] for name in ('verify', 'cert', 'proxies')}
                    self._adapter = HTTPAdapter(pool_connections=2, pool_maxsize=_POOL)
                    self._pid = os.getpid()
        return self._adapter, self._settings


def _path(doc_id: str) -> str:
    # The slash after _design is part of the path, not of a name: CouchDB redirects if it is encoded.
    prefix, slash, name = doc_id.rpartition('/') if doc_id.startswith(('_design/', '_local/')) else ('', '', doc_id)
    return f'/{prefix}{slash}{quote(name, safe="")}'


def _query(params: Mapping[str, Any] | None) -> str:
    if not params:
        return ''
    return '?' + urlencode({k: ('true' if v else 'false') if isinstance(v, bool) else v for k, v in params.items()})


def chunks(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    """Yield `items` in slices of at most `size`."""
    return (items[i:i + size] for i in range(0, len(items), size))
