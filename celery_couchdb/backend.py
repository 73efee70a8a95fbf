"""The Celery result backend: each result is one document, which a person can read in CouchDB's web interface.

::

    {"_id": "celery-task-meta-<task id>", "type": "Result", "status": "SUCCESS",
     "value": {"task_id", "status", "result", "traceback", "children", "date_done", …}}

A saved group is a `Group`, anything else a `Value`, both with a `status` of null. `value` holds Celery's own encoding
of a result, taken apart only if it comes back the same; see `pack`.
"""

from __future__ import annotations

import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from celery import states
from celery.backends.base import KeyValueStoreBackend
from kombu.utils.encoding import bytes_to_str
from kombu.utils.url import parse_url

from kombu_couchdb.address import Address
from kombu_couchdb.client import Client, Document
from kombu_couchdb.errors import RETRIED, AccessDenied, ConfigurationError, Conflict, DatabaseMissing, NotFound

__all__ = ['CouchDBBackend']

T = TypeVar('T')

#: How often a write is tried while others keep changing the same document.
_ATTEMPTS = 10


class CouchDBBackend(KeyValueStoreBackend):
    """Results and saved groups in one CouchDB database. *Every* method raises the errors of `kombu_couchdb.errors`."""

    key_t = bytes_to_str
    supports_native_join = True
    supports_result_compression = True

    def __init__(self, app: Any, url: str | None = None, **kwargs: Any) -> None:
        super().__init__(app, url=url, **kwargs)
        self.client = Client(address_of(url or 'couchdb://'))

    def __reduce__(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return super().__reduce__(args, {**(kwargs or {}), 'expires': self.expires, 'url': self.url})

    def exception_safe_to_retry(self, exc: Exception) -> bool:
        """Tell Celery what the setting `result_backend_always_retry` covers."""
        return isinstance(exc, RETRIED)

    # -- what Celery's base class needs of a store

    def get(self, key: str | bytes) -> str | bytes | None:
        """Return the encoded value of a key, None if there is none; one request."""
        return unpack(self._read(bytes_to_str(key)))

    def mget(self, keys: Iterable[str | bytes]) -> list[str | bytes | None]:
        """Return the encoded values of keys, in their order; one request."""
        return [unpack(doc) for doc in self._call(self.client.fetch, [bytes_to_str(key) for key in keys])]

    def set(self, key: str | bytes, value: str | bytes) -> None:
        """Store an encoded value, over any other."""
        self._write(bytes_to_str(key), value)

    def delete(self, key: str | bytes) -> None:
        """Delete a key, if it exists; two requests."""
        doc_id = bytes_to_str(key)
        for left in reversed(range(_ATTEMPTS)):
            current = self._read(doc_id)
            if current is None:
                return
            try:
                self._call(self.client.put, {'_id': doc_id, '_rev': current['_rev'], '_deleted': True})
                return
            except Conflict:
                if not left:
                    raise

    def _store_result(self, task_id: str | bytes, result: Any, state: str, traceback: Any = None, request: Any = None,
                      **kwargs: Any) -> Any:
        # The base class reads the state, decides and writes: two requests, and a gap for another writer in between.
        meta = self._get_result_meta(result=result, state=state, traceback=traceback, request=request)
        meta['task_id'] = bytes_to_str(task_id)
        self._write(self.get_key_for_task(task_id), self.encode(meta), state)
        return result

    # -- requests

    def _write(self, doc_id: str, payload: str | bytes, status: str | None = None) -> None:
        """Store a document; with a `status`, not over a result whose status is SUCCESS.

        One request for a new document, three over an older one. *Raises* `Conflict` if others were always faster.
        """
        kind = 'Result' if status else 'Group' if doc_id.startswith(self.group_keyprefix) else 'Value'
        doc = {'_id': doc_id, 'type': kind, 'status': status, **pack(payload, self.content_type)}
        for left in reversed(range(_ATTEMPTS)):
            try:
                self._call(self.client.put, doc)
                return
            except Conflict:
                if not left:
                    raise
            current = self._read(doc_id) or {}
            if status and current.get('status') == states.SUCCESS:
                return
            doc.pop('_rev', None)
            doc.update({'_rev': current['_rev']} if current else {})

    def _read(self, doc_id: str) -> Document | None:
        try:
            return self._call(self.client.get, doc_id)
        except NotFound:
            return None

    def _call(self, request: Callable[..., T], argument: Any) -> T:
        """Make a request; if the database is missing, create it and try once more."""
        try:
            return request(argument)
        except DatabaseMissing:
            try:
                self.client.create()
            except AccessDenied as exc:
                address = self.client.address
                raise AccessDenied(
                    f'{address.url}: the database does not exist and user {address.user!r} may not create it; have an '
                    f'administrator create it and make this user a member, or name an existing one in result_backend'
                ) from exc
        return request(argument)


def address_of(url: str) -> Address:
    """Return what a `couchdb://` or `couchdbs://` URL says; *raises* `ConfigurationError`, without the URL's text."""
    try:
        parts = parse_url(url)
    except (ValueError, KeyError, TypeError):
        parts = {}
    # A '/' or '#' in a password ends the host too early: a piece of the password would be taken for the port.
    if not parts or ('@' in url and not parts['userid']):
        raise ConfigurationError('result_backend: the URL cannot be read; write couchdb://user:password@host:port/db, '
                                 'with user and password percent-encoded, or couchdbs://… for TLS')
    scheme, host, port, user, password, database = (
        parts.pop(name) for name in ('transport', 'hostname', 'port', 'userid', 'password', 'virtual_host'))
    tls = parts.pop('ssl', None)
    if scheme not in ('couchdb', 'couchdbs'):
        raise ConfigurationError(f'result_backend: unknown scheme {scheme!r}; write couchdb://, or couchdbs:// for TLS')
    if parts:
        raise ConfigurationError(f'result_backend: unknown option {min(parts)!r} in the URL')
    return Address.of(scheme=scheme, host=host, port=port, database=database, default_database='celery_results',
                      user=user, password=password, tls=tls)


def pack(payload: str | bytes, content_type: str) -> Document:
    """Return the members of a document that hold an encoded value.

    JSON becomes an object if every server returns it as it was; else the encoded text is kept as it is, and bytes as
    base64, both with their content type.
    """
    if isinstance(payload, bytes):
        return {'content_type': content_type, 'base64': b64encode(payload).decode('ascii')}
    value = _portable(payload) if content_type == 'application/json' else None
    return {'value': value} if isinstance(value, dict) else {'content_type': content_type, 'value': payload}


def unpack(doc: Document | None) -> str | bytes | None:
    """Return the encoded value that a document holds, None if there is none."""
    if doc is None:
        return None
    if 'base64' in doc:
        return b64decode(doc['base64'])
    value = doc.get('value')
    # Text is also what Celery's own CouchDB backend stored, under the same ids.
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _portable(payload: str) -> Any:
    """Return the value of a JSON text, None if a server written in Erlang or JavaScript might change or refuse it."""
    if '"__type__"' in payload or '"__proto__"' in payload:  # kombu's own types stay as it wrote them
        return None
    try:
        value = json.loads(payload, parse_int=_number, parse_float=_number, parse_constant=_number)
        if '\\ud' in payload:
            json.dumps(value, ensure_ascii=False).encode()  # fails for half a surrogate pair
        return value
    except ValueError:
        return None


def _number(text: str) -> int | float:
    if len(text) < 16 and text.lstrip('-').isdigit():  # JavaScript's integers have 53 bits
        return int(text)
    number = float(text)  # JavaScript makes 2.0 an integer, Erlang makes the smallest fractions 0.0, both know no NaN
    if number.is_integer() or not sys.float_info.min <= abs(number) <= sys.float_info.max:
        raise ValueError(text)
    return number
