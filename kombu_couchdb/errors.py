"""The error tree, and the one place that turns HTTP into it.

::

    CouchDBError
     ├── ServerUnavailable      refused, cut off, too slow, 5xx, 429: try again
     │    └── BrokenAnswer      an answer that CouchDB never gives to this request: try again
     ├── DatabaseMissing        404 for the whole database: try again, it is created anew
     ├── AccessDenied           401, 403: a person has to change a password or a right
     ├── NotCouchDB             something else answers at that address
     ├── ConfigurationError     a transport option or URL that cannot be right (a ValueError too)
     ├── DocumentTooLarge       413: the message or result is larger than the server takes
     ├── NotFound               404 for one document
     ├── Conflict               409: somebody else was first
     ├── Unstorable             a message, name or result has in it what CouchDB cannot hold (a ValueError too)
     └── RequestRefused         any other 4xx: our request was wrong
          └── NestedTooDeeply   a document in the database that Python cannot read

kombu and Celery retry on `RETRIED`; everything else reaches the caller at once. No error text holds a password.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import requests
from requests import exceptions as http

__all__ = [
    'RETRIED', 'AccessDenied', 'BrokenAnswer', 'ConfigurationError', 'Conflict', 'CouchDBError', 'DatabaseMissing',
    'DocumentTooLarge', 'NestedTooDeeply', 'NotCouchDB', 'NotFound', 'RequestRefused', 'ServerUnavailable', 'Unstorable',
]


class CouchDBError(Exception):
    """The root: catch this to catch all that `kombu_couchdb` and `celery_couchdb` raise."""

    #: Of a write of many documents in several requests: CouchDB's answers to the requests before the one that failed.
    answered: Sequence[dict[str, Any]] = ()


class ServerUnavailable(CouchDBError, ConnectionError):
    """The server gave no usable answer; whether a write was stored is unknown. Safe to try again."""

    @property
    def was_cut(self) -> bool:
        """Whether the connection was refused or cut: a server or proxy may close an idle one as it is used again."""
        return isinstance(self.__cause__, http.ConnectionError) and not isinstance(self.__cause__, http.Timeout)


class BrokenAnswer(ServerUnavailable):
    """The answer is none that CouchDB gives to this request: it was cut off, or something between us changed it."""


class DatabaseMissing(CouchDBError, ConnectionError):
    """The database does not exist (any more); connecting again creates it where the user may."""


class AccessDenied(CouchDBError):
    """User, password or rights do not suffice. Trying again would only lock the account."""


class NotCouchDB(CouchDBError):
    """The server at this address does not speak CouchDB's protocol."""


class ConfigurationError(CouchDBError, ValueError):
    """An option or a URL is wrong; the text names it and says what is expected."""


class DocumentTooLarge(CouchDBError):
    """The document or its attachment is larger than the server takes (`max_document_size`, `max_attachment_size`), or a proxy."""


class NotFound(CouchDBError):
    """The document does not exist."""


class Conflict(CouchDBError):
    """The document was changed by somebody else since it was read."""


class Unstorable(CouchDBError, ValueError):
    """A message, name or result has in it what CouchDB cannot hold; nothing was sent, and the text says what it is."""


class RequestRefused(CouchDBError):
    """The server refused the request as malformed."""


class NestedTooDeeply(RequestRefused):
    """A document in the database is nested more deeply than Python can read."""


#: What kombu and Celery reconnect and retry on.
RETRIED: tuple[type[Exception], ...] = (ServerUnavailable, DatabaseMissing)


def from_transport(exc: Exception, where: str) -> CouchDBError:
    """Return our error for one that `requests` raised while talking to `where`."""
    if isinstance(exc, ValueError) and not isinstance(exc, OSError):
        return ConfigurationError(f'{where}: host or port is not valid in the URL')
    if not isinstance(exc, http.RequestException):  # requests says so of a certificate file that is not there
        return ConfigurationError(f'{where}: {exc}')
    if isinstance(exc, http.SSLError) or 'SSL' in _short(exc):
        return ServerUnavailable(f'{where}: {_tls(_short(exc))} ({_short(exc)})')
    if isinstance(exc, http.ConnectTimeout):
        return ServerUnavailable(f'{where}: no connection within the time limit; is host and port right?')
    if isinstance(exc, http.Timeout):
        return ServerUnavailable(f'{where}: no answer within the time limit (transport option request_timeout)')
    if isinstance(exc, (http.InvalidURL, http.InvalidSchema, http.MissingSchema)):
        return ConfigurationError(f'{where}: host or port is not valid in the URL')
    return ServerUnavailable(f'{where}: {_short(exc)}')


def from_status(response: requests.Response, where: str, user: str | None, size: int) -> CouchDBError:
    """Return our error for an answer with a status of 400 or more; `size` is that of the request body in bytes."""
    status, reason = response.status_code, reason_of(response)
    who = f'user {user!r}' if user else 'nobody (no user in the URL)'
    if status in (401, 403):
        return AccessDenied(f'{where} refused {who}: {reason.rstrip(".") or "access denied"}; ' + (
            'let an administrator run "celery -A your_app couchdb setup", which makes the user a member' if reason == _NO_MEMBER
            else 'check the user, password and rights'))
    if status == 404 and reason in _NO_DATABASE:
        return DatabaseMissing(f'{where}: the database does not exist')
    if status == 404:
        return NotFound(f'{where}: {reason}')
    if status in (409, 412):
        return Conflict(f'{where}: {reason}')
    if status == 413:
        return DocumentTooLarge(
            f'{where}: {size:,} bytes are more than the server takes ({reason}); make the message or result smaller, or raise '
            f'CouchDB\'s limit in its [couchdb] section: max_document_size (8,000,000 by default), for messages '
            f'max_attachment_size')
    if status == 500 and reason == _NO_NUMBER:
        return RequestRefused(f'{where}: a number in the document is larger than CouchDB can hold')
    if status >= 500 or status == 429:
        return ServerUnavailable(f'{where} answered {status}: {reason}')
    return RequestRefused(f'{where} answered {status}: {reason}')


def reason_of(response: requests.Response) -> str:
    """Return what the server says of an answer with a status of 400 or more."""
    body = _json(response)
    return _line(body.get('reason') or body.get('error') or response.reason or '')[:300]


def from_answer(answer: dict[str, Any], where: str) -> CouchDBError:
    """Return our error for one document in an answer to `_bulk_docs`."""
    error, text = answer.get('error'), f'{where}: {_line(answer.get("error"))}: {_line(answer.get("reason"))[:300]}'
    if error == 'conflict':
        return Conflict(text)
    if error in ('forbidden', 'unauthorized'):
        return AccessDenied(text)
    if error == 'refused':
        return RequestRefused(text)
    if error == 'unstorable':
        return Unstorable(text)
    return DocumentTooLarge(text) if error == 'document_too_large' else ServerUnavailable(text)


#: What OpenSSL says, and what it means.
_TLS = {
    r'has expired|not yet valid': "the server's TLS certificate is out of date, or this machine's clock is wrong",
    r'mismatch': "the server's TLS certificate is for another host; use the name that stands in it",
    r'CERTIFICATE_VERIFY_FAILED|certificate verify failed':
        "the server's TLS certificate could not be verified; give the CA file as ssl_ca_certs in the URL or as ca_certs in "
        'broker_use_ssl',
    r'': 'TLS failed; does the server speak TLS at this port, or want a client certificate (certfile and keyfile)?',
}

#: How CouchDB says that a user, whose password is right, is no member of a database.
_NO_MEMBER = 'You are not allowed to access this db.'

#: How CouchDB says that a whole number is beyond 1.8e308 (an HTTP 500, measured with 3.5); it refuses all that is in the request.
_NO_NUMBER = 'badarith'

#: How CouchDB and PouchDB say that the database itself is missing; a missing document has other reasons.
_NO_DATABASE = frozenset({'Database does not exist.', 'no_db_file', 'Database does not exist'})


def _tls(reason: str) -> str:
    return next(meaning for pattern, meaning in _TLS.items() if re.search(pattern, reason))


def _json(response: requests.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _line(text: Any) -> str:
    """Return what a server said as one line that can stand in a log."""
    return ''.join(char if char.isprintable() else ' ' for char in str(text)).strip()


def _short(exc: BaseException) -> str:
    """Return the innermost cause of `exc` in one line: urllib3 wraps it three times."""
    seen = exc
    while True:
        inner = getattr(seen, 'reason', None) or next((a for a in seen.args if isinstance(a, BaseException)), None)
        if not isinstance(inner, BaseException):
            break
        seen = inner
    text = _line(str(seen).split('\n')[0])
    return re.sub(r'^.*?(>|\)): ', '', text)[:200] or type(seen).__name__  # without urllib3's name of the connection
