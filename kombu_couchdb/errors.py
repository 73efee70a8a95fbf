"""Errors: one tree for both packages, and the only module that makes them from error statuses of HTTP.

::

    CouchDBError
     ├── ServerUnavailable      no usable response: refused, cut off, timed out, 5xx, 429, account locked    retried
     │    └── BrokenAnswer      the response is not one that CouchDB sends                                   retried
     │         └── AnswerTooLarge  the response is larger than the client reads                              retried
     ├── DatabaseMissing        404: the database does not exist; reconnecting creates it                    retried
     ├── AccessDenied           401, 403: somebody must change a password or a right
     ├── NotCouchDB             another service responds at this address
     ├── ConfigurationError     a URL, option or argument is wrong (also a ValueError)
     ├── DocumentTooLarge       413: the message or result exceeds a limit of the server
     ├── NotFound               404: the document does not exist
     ├── Conflict               409, 412: another process changed the document, or created the database, first
     ├── Unstorable             CouchDB cannot store this message, name or result (also a ValueError)
     └── RequestRefused         any other 4xx, and 500 for a number that CouchDB cannot hold: the request is wrong
          └── NestedTooDeeply   without a status: a document in the database is nested too deeply to be read

kombu and Celery reconnect and retry on the errors in `RETRIED`, which are marked above. They do not retry other errors,
because a retry would fail again. The consumer's thread retries all but `AccessDenied` and `ConfigurationError`. No
error text contains a password.
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
    """Base class. Catch it to catch every error that `kombu_couchdb` and `celery_couchdb` raise."""

    #: After a bulk write that needed several requests: the results of the requests before the one that failed.
    answered: Sequence[Any] = ()


class ServerUnavailable(CouchDBError, ConnectionError):
    """The server gave no usable response; a write may or may not be stored. kombu and Celery reconnect and retry."""

    #: True if the connection could not be opened or was closed (DNS, TCP, TLS). Reads are then sent once more, or once
    #: to each other node: servers and proxies also close idle connections.
    was_cut = False

    #: The HTTP status of the response; None if no readable response arrived.
    status: int | None = None


class BrokenAnswer(ServerUnavailable):
    """The response is not one that CouchDB sends: it was cut off, or a proxy changed it. kombu and Celery retry."""


class AnswerTooLarge(BrokenAnswer):
    """The response has more bytes than the client reads in one request. kombu and Celery retry."""


class DatabaseMissing(CouchDBError, ConnectionError):
    """The database does not exist. kombu and Celery reconnect and retry; connecting creates it if the user may."""


class AccessDenied(CouchDBError):
    """CouchDB refused the user, the password or the user's rights. Not retried: wrong passwords lock the account."""


class NotCouchDB(CouchDBError):
    """The server at this address does not speak CouchDB's protocol. Not retried."""


class ConfigurationError(CouchDBError, ValueError):
    """An option, a URL or an argument is wrong; the text names it and says what is expected. Not retried."""


class DocumentTooLarge(CouchDBError):
    """The document or attachment exceeds `max_document_size`, `max_attachment_size` or a proxy's limit. Not retried."""


class NotFound(CouchDBError):
    """The document does not exist. Not retried."""


class Conflict(CouchDBError):
    """Another process changed the document after it was read. Not retried."""


class Unstorable(CouchDBError, ValueError):
    """CouchDB cannot store a part of this message, name or result; the text says which. Nothing is sent or retried."""


class RequestRefused(CouchDBError):
    """The server refused the request as malformed. Not retried."""


class NestedTooDeeply(RequestRefused):
    """A document in the database is nested more deeply than Python can read. Not retried."""


#: kombu and Celery reconnect and retry on these errors.
RETRIED: tuple[type[Exception], ...] = (ServerUnavailable, DatabaseMissing)


def from_transport(exc: Exception, where: str, *, known: bool = True) -> CouchDBError:
    """Return the error for an exception that `requests` raised.

    `where` is the URL without user and password; `known` says whether the server has ever responded.

    Raise the returned error outside the `except` block of `exc`. Otherwise `exc` is its context, and error trackers
    record the variables of its frames: the request's headers with the password.
    """
    inner, text = _innermost(exc), _short(exc)
    if isinstance(inner, AnswerTooLarge):
        return AnswerTooLarge(f'{where}: the response has more bytes than are read at once')
    if isinstance(exc, ValueError) and not isinstance(exc, OSError):
        return ConfigurationError(f'{where}: host or port is not valid in the URL')
    if not isinstance(exc, http.RequestException):  # requests raises OSError for a missing certificate file
        return ConfigurationError(f'{where}: {exc}')
    if isinstance(exc, http.SSLError) or 'SSL' in text:
        return _cut(f'{where}: {_tls(text)} ({text})', not re.search(_NO_TLS, text))
    if str(inner).startswith(_ALERT):
        return ServerUnavailable(f'{where}: {_TLS_WANTED}')
    if isinstance(exc, http.ConnectTimeout):
        return ServerUnavailable(f'{where}: no connection within the time limit; is host and port right?')
    if isinstance(exc, http.Timeout) or re.match(r'(Read |The \w+ operation )?timed out', text):
        return ServerUnavailable(f'{where}: no response within the time limit (transport option request_timeout)')
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
    """Return the error for a response with a status of 400 or more.

    `where` is the URL without user and password; `size` is the size of the request body in bytes.
    """
    status, reason = response.status_code, reason_of(response)
    if status == 403 and is_account_lock(reason):
        return account_locked(where, user)
    if status in (401, 403):
        return AccessDenied(
            f'{where} refused {describe_user(user)}: {reason.rstrip(".") or "access denied"}; '
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
            f'{where}: {size:,} bytes are more than the server takes ({reason}); make the message or result smaller, '
            f"or raise CouchDB's limit in its [couchdb] section: max_document_size (8,000,000 by default), for "
            f'messages max_attachment_size'
        )
    if status == 500 and reason == _NO_NUMBER:
        return RequestRefused(f'{where}: a number in the document is larger than CouchDB can hold')
    if status >= 500 or status == 429:
        error = ServerUnavailable(f'{where} responded with status {status}: {reason}')
        error.status = status
        return error
    if status == 400 and where.startswith('http:') and re.search(b'HTTPS|SSL', response.content):
        return NotCouchDB(f'{where}: {_TLS_WANTED}')
    return RequestRefused(f'{where} responded with status {status}: {reason}')


def describe_user(user: str | None) -> str:
    """Return the words that name a user in an error text."""
    return f'user {user!r}' if user else 'nobody (no user in the URL)'


def access_denied(where: str, user: str | None, what: str, remedy: str) -> AccessDenied:
    """Return the error for a user without the right to do `what`.

    `remedy` says what to change; if there is no user, the text asks for one instead.
    """
    if user:
        return AccessDenied(f'{where}: user {user!r} may not {what}; {remedy}')
    return AccessDenied(f'{where}: no user in the URL, and without one nobody may {what}; {_WRITE_USER}')


def reason_of(response: requests.Response) -> str:
    """Return the server's reason for a status of 400 or more, in one line of at most 300 characters."""
    body = _json(response)
    return _line(body.get('reason') or body.get('error') or response.reason or '')[:300]


def is_account_lock(reason: str) -> bool:
    """Tell whether CouchDB has locked the user for this network address. It then refuses the right password, too."""
    return reason.startswith('Account is temporarily locked')


def account_locked(where: str, user: str | None) -> ServerUnavailable:
    """Return the error for a locked user. The lock ends by itself after at most five minutes, so retrying helps."""
    return ServerUnavailable(
        f'{where} has locked user {user!r} for up to five minutes, since wrong passwords for it came from '
        f'this network address; find who sends them, or give each site a user of its own'
    )


def from_answer(answer: dict[str, Any], where: str) -> CouchDBError:
    """Return the error for one document in a response to `_bulk_docs`."""
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


#: The text of a connection whose TLS handshake timed out.
NO_HANDSHAKE = 'no response to the TLS handshake'

#: OpenSSL's texts for a response that is not TLS.
_NO_TLS = (
    f'{NO_HANDSHAKE}|WRONG_VERSION_NUMBER|record layer failure|UNKNOWN_PROTOCOL|PACKET_LENGTH_TOO_LONG|HTTP_REQUEST'
)

#: The first bytes of a TLS alert: a TLS server sends one when it receives plain HTTP.
_ALERT = '\x15\x03'

#: The texts of a connection that the server closes before the alert can be read.
_HUNG_UP = re.compile('reset by peer|without response')

_WRITE_TLS = 'write couchdbs:// for couchdb:// in the URL'
_TLS_WANTED = f'the server speaks TLS at this port; {_WRITE_TLS}'

#: Patterns of OpenSSL's texts, and what each means for the user. The first match counts.
_TLS = {
    _NO_TLS: 'TLS failed; does the server speak TLS at this port? couchdb:// is plain HTTP',
    r'has expired|not yet valid': "the server's TLS certificate is out of date, or this machine's clock is wrong",
    r'mismatch': "the server's TLS certificate is for another host; use the host name in the certificate",
    r'CERTIFICATE_VERIFY_FAILED|certificate verify failed': (
        "the server's TLS certificate could not be verified; give the CA file as ssl_ca_certs in the URL or as "
        'ca_certs in broker_use_ssl'
    ),
    r'': 'TLS failed; does the server speak TLS at this port, or want a client certificate (certfile and keyfile)?',
}

#: The advice when the URL names no user.
_WRITE_USER = 'write couchdb://user:password@host:port/db'

#: CouchDB's reason if the password is right but the user is not a member of the database.
_NO_MEMBER = 'You are not allowed to access this db.'

#: CouchDB's reason for an integer above 1.8e308. It responds with status 500 and refuses the whole request (measured
#: with 3.5), so without this the client would retry forever.
_NO_NUMBER = 'badarith'

#: The reasons of CouchDB and PouchDB for a missing database; a missing document has other reasons.
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
    """Return a server's text as one printable line, safe for a log."""
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
    """Return the innermost cause of `exc` in one line of at most 200 characters."""
    seen = _innermost(exc)
    text = _line(str(seen).split('\n')[0])
    return re.sub(r'^.*?(>|\)): ', '', text)[:200] or type(seen).__name__  # without urllib3's name of the connection
