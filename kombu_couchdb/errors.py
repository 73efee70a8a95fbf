"""The error tree, and the one place that turns HTTP into it.

::

    CouchDBError
     ├── ServerUnavailable      refused, cut off, too slow, 5xx, 429, a user that is locked for minutes: try again
     │    └── BrokenAnswer      an answer that CouchDB never gives to this request: try again
     │         └── AnswerTooLarge  more than is read at once
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
    'RETRIED',
    'AccessDenied',
    'AnswerTooLarge',
    'BrokenAnswer',
    'ConfigurationError',
    'Conflict',
    'CouchDBError',
    'DatabaseMissing',
    'DocumentTooLarge',
    'NestedTooDeeply',
    'NotCouchDB',
    'NotFound',
    'RequestRefused',
    'ServerUnavailable',
    'Unstorable',
]


class CouchDBError(Exception):
    """The root: catch this to catch all that `kombu_couchdb` and `celery_couchdb` raise."""

    #: Of a write of many documents in several requests: CouchDB's answers to the requests before the one that failed.
    answered: Sequence[Any] = ()


class ServerUnavailable(CouchDBError, ConnectionError):
    """The server gave no usable answer; whether a write was stored is unknown. Safe to try again."""

    #: Whether the connection was refused or cut: a server or proxy may close an idle one as it is used again.
    was_cut = False

    #: The status of the answer; None if there was none that could be read.
    status: int | None = None


class BrokenAnswer(ServerUnavailable):
    """The answer is none that CouchDB gives to this request: it was cut off, or something between us changed it."""


class AnswerTooLarge(BrokenAnswer):
    """The answer has more bytes than are read at once."""


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


def from_transport(exc: Exception, where: str, *, known: bool = True) -> CouchDBError:
    """Return our error for one that `requests` raised while talking to `where`; `known` is whether that has ever answered.

    Raise it where `exc` is no longer handled: what caused that has the headers of the request in its frames, and they are
    seen by whoever records the variables of a traceback.
    """
    inner, text = _innermost(exc), _short(exc)
    if isinstance(inner, AnswerTooLarge):
        return AnswerTooLarge(f'{where}: the answer has more bytes than are read at once')
    if isinstance(exc, ValueError) and not isinstance(exc, OSError):
        return ConfigurationError(f'{where}: host or port is not valid in the URL')
    if not isinstance(exc, http.RequestException):  # requests says so of a certificate file that is not there
        return ConfigurationError(f'{where}: {exc}')
    if isinstance(exc, http.SSLError) or 'SSL' in text:
        return _cut(f'{where}: {_tls(text)} ({text})', not re.search(_NO_TLS, text))
    if str(inner).startswith(_ALERT):
        return ServerUnavailable(f'{where}: {_TLS_WANTED}')
    if isinstance(exc, http.ConnectTimeout):
        return ServerUnavailable(f'{where}: no connection within the time limit; is host and port right?')
    if isinstance(exc, http.Timeout) or re.match(r'(Read |The \w+ operation )?timed out', text):
        return ServerUnavailable(f'{where}: no answer within the time limit (transport option request_timeout)')
    if isinstance(exc, (http.InvalidURL, http.InvalidSchema, http.MissingSchema)):
        return ConfigurationError(f'{where}: host or port is not valid in the URL')
    if not known and where.startswith('http:') and _HUNG_UP.search(text):
        text = f'{text}; if the server speaks TLS at this port, {_WRITE_TLS}'
    return _cut(f'{where}: {text}', isinstance(exc, http.ConnectionError))


def _cut(text: str, was_cut: bool) -> ServerUnavailable:
    error = ServerUnavailable(text)
    error.was_cut = was_cut
    return error


def from_status(response: requests.Response, where: str, user: str | None, size: int) -> CouchDBError:
    """Return our error for an answer with a status of 400 or more; `size` is that of the request body in bytes."""
    status, reason = response.status_code, reason_of(response)
    if status == 403 and is_lock(reason):
        return locked(where, user)
    if status in (401, 403):
        return AccessDenied(
            f'{where} refused {who(user)}: {reason.rstrip(".") or "access denied"}; '
            + (
                _WRITE_USER
                if not user
                else 'let an administrator run "celery -A your_app couchdb setup", which makes the user a member'
                if reason == _NO_MEMBER
                else 'check the user, password and rights'
            )
        )
    if status == 404 and reason in _NO_DATABASE:
        return DatabaseMissing(f'{where}: the database does not exist')
    if status == 404:
        return NotFound(f'{where}: {reason}')
    if status in (409, 412):
        return Conflict(f'{where}: {reason}')
    if status == 413:
        return DocumentTooLarge(
            f'{where}: {size:,} bytes are more than the server takes ({reason}); make the message or result smaller, or raise '
            f"CouchDB's limit in its [couchdb] section: max_document_size (8,000,000 by default), for messages "
            f'max_attachment_size'
        )
    if status == 500 and reason == _NO_NUMBER:
        return RequestRefused(f'{where}: a number in the document is larger than CouchDB can hold')
    if status >= 500 or status == 429:
        error = ServerUnavailable(f'{where} answered {status}: {reason}')
        error.status = status
        return error
    if status == 400 and where.startswith('http:') and re.search(b'HTTPS|SSL', response.content):
        return NotCouchDB(f'{where}: {_TLS_WANTED}')
    return RequestRefused(f'{where} answered {status}: {reason}')


def who(user: str | None) -> str:
    """Return how a text names the user that CouchDB has refused."""
    return f'user {user!r}' if user else 'nobody (no user in the URL)'


def may_not(where: str, user: str | None, what: str, remedy: str) -> AccessDenied:
    """Return our error for a user who may not do `what`, and what to change; without a user, that is to name one."""
    if user:
        return AccessDenied(f'{where}: user {user!r} may not {what}; {remedy}')
    return AccessDenied(f'{where}: no user in the URL, and without one nobody may {what}; {_WRITE_USER}')


def reason_of(response: requests.Response) -> str:
    """Return what the server says of an answer with a status of 400 or more."""
    body = _json(response)
    return _line(body.get('reason') or body.get('error') or response.reason or '')[:300]


def is_lock(reason: str) -> bool:
    """Tell whether CouchDB says that it has locked a user for an address: the right password is refused then, too."""
    return reason.startswith('Account is temporarily locked')


def locked(where: str, user: str | None) -> ServerUnavailable:
    """Return our error for a user whom CouchDB has locked: it ends by itself, and nothing is wrong here."""
    return ServerUnavailable(
        f'{where} has locked user {user!r} for up to five minutes, since wrong passwords for it came from '
        f'this network address; find who sends them, or give each site a user of its own'
    )


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


#: How a connection says that its TLS handshake was not answered in time.
NO_HANDSHAKE = 'no answer to the TLS handshake'

#: How OpenSSL says that what it was answered is no TLS.
_NO_TLS = (
    f'{NO_HANDSHAKE}|WRONG_VERSION_NUMBER|record layer failure|UNKNOWN_PROTOCOL|PACKET_LENGTH_TOO_LONG|HTTP_REQUEST'
)

#: How an alert of TLS begins, with which a server answers plain HTTP.
_ALERT = '\x15\x03'

#: What becomes of that alert, if the server hangs up at once.
_HUNG_UP = re.compile('reset by peer|without response')

_WRITE_TLS = 'write couchdbs:// for couchdb:// in the URL'
_TLS_WANTED = f'the server speaks TLS at this port; {_WRITE_TLS}'

#: What OpenSSL says, and what it means.
_TLS = {
    _NO_TLS: 'TLS failed; does the server speak TLS at this port? couchdb:// is plain HTTP',
    r'has expired|not yet valid': "the server's TLS certificate is out of date, or this machine's clock is wrong",
    r'mismatch': "the server's TLS certificate is for another host; use the name that stands in it",
    r'CERTIFICATE_VERIFY_FAILED|certificate verify failed': "the server's TLS certificate could not be verified; give the CA file as ssl_ca_certs in the URL or as ca_certs in "
    'broker_use_ssl',
    r'': 'TLS failed; does the server speak TLS at this port, or want a client certificate (certfile and keyfile)?',
}

#: What to change when no user is known.
_WRITE_USER = 'write couchdb://user:password@host:port/db'

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


def _innermost(exc: BaseException) -> BaseException:
    """Return the innermost cause of `exc`: urllib3 wraps it three times."""
    seen = exc
    while True:
        inner = getattr(seen, 'reason', None) or next((a for a in seen.args if isinstance(a, BaseException)), None)
        if not isinstance(inner, BaseException):
            return seen
        seen = inner


def _short(exc: BaseException) -> str:
    """Return the innermost cause of `exc` in one line."""
    seen = _innermost(exc)
    text = _line(str(seen).split('\n')[0])
    return re.sub(r'^.*?(>|\)): ', '', text)[:200] or type(seen).__name__  # without urllib3's name of the connection
