"""Failed requests: which error stands for an exception of `requests`, an error status of HTTP or a refused write."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import requests
from requests import exceptions as http

from ..errors import (
    NOBODY,
    WRITE_USER,
    AccessDenied,
    AnswerTooLarge,
    ConfigurationError,
    Conflict,
    CouchDBError,
    DatabaseMissing,
    DocumentTooLarge,
    NotCouchDB,
    NotFound,
    NotOffered,
    RequestRefused,
    ServerUnavailable,
    Unstorable,
    ViewFailed,
    account_locked,
)

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

#: CouchDB's error if the process that runs the functions of views ends, or does not respond.
_VIEW_FAILED = 'os_process_error'

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

#: Patterns of the texts of connections that were not made, and what each means for the user.
_UNREACHABLE = {
    'Failed to resolve|Name or service not known|nodename nor servname|getaddrinfo': (
        'the host name cannot be resolved; correct it, or check the name server'
    ),
    'Connection refused|actively refused': 'no server listens at this port; start it, or correct host and port',
}

#: CouchDB's reason if the password is right but the user is not a member of the database.
_NO_MEMBER = 'You are not allowed to access this db.'

#: CouchDB's reason for an integer above 1.8e308. It responds with status 500 and refuses the whole request (measured
#: with 3.5), so without this the client would retry forever.
_NO_NUMBER = 'badarith'

#: The reasons of CouchDB and PouchDB for a missing database; a missing document has other reasons.
_NO_DATABASE = frozenset({'Database does not exist.', 'no_db_file', 'Database does not exist'})

#: The errors of single documents in a bulk write, and of `write_result`; with any other the server has a problem.
_DECISIONS: dict[str, type[CouchDBError]] = {
    'conflict': Conflict,
    'forbidden': AccessDenied,
    'unauthorized': AccessDenied,
    'refused': RequestRefused,
    'unstorable': Unstorable,
    'document_too_large': DocumentTooLarge,
}

#: What to do about tombstones that cannot be purged.
_TOMBSTONES_STAY = 'tombstones stay; only a new database is without them, see "Move to a new database" in the docs'

#: A purge has conditions that only these endpoints can tell.
_UNSAFE = f'whether a purge would be safe is unknown, so {_TOMBSTONES_STAY}'

#: CouchDB's endpoints for administrators that managed services may not offer, and what that means.
_ENDPOINTS = {
    '_purge': _TOMBSTONES_STAY,
    '_membership': _UNSAFE,
    '_node': _UNSAFE,
    '_active_tasks': _UNSAFE,
    '_compact': 'only the service can compact the databases',
    '_view_cleanup': 'only the service can delete the files of old indexes',
    '_revs_limit': 'the service decides how many revisions of a document are remembered',
    '_security': 'give the users the right to read and write the databases with the tools of the service',
    '_users': 'create users with the tools of the service; whether they exist is not checked',
    '_session': 'nobody can log in to the page; start it with --trust-header or --no-login',
}


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
    for pattern, meaning in _UNREACHABLE.items():
        if re.search(pattern, text) and not isinstance(exc, http.ProxyError):
            return _cut(f'{where}: {meaning} ({text})', True)
    if not known and where.startswith('http:') and _HUNG_UP.search(text):
        text = f'{text}; if the server speaks TLS at this port, {_WRITE_TLS}'
    return _cut(f'{where}: {text}', isinstance(exc, http.ConnectionError))


def _cut(text: str, was_cut: bool) -> ServerUnavailable:
    error = ServerUnavailable(text)
    error.was_cut = was_cut
    return error


def from_status(response: requests.Response, where: str, who: str | None, size: int) -> CouchDBError:
    """Return the error for a response with a status of 400 or more.

    `where` is the URL without user and password, `who` describes the user, see `Client.who`, and `size` is the size of
    the request body in bytes.
    """
    error = _from_status(response, where, who, size)
    error.status = response.status_code
    return error


def _from_status(response: requests.Response, where: str, who: str | None, size: int) -> CouchDBError:
    status, reason = response.status_code, reason_of(response)
    if status == 403 and is_account_lock(reason):
        return account_locked(where, who)
    if status in (401, 403):
        return AccessDenied(
            f'{where} refused {who or NOBODY}: {reason.rstrip(".") or "access denied"}; '
            + (
                WRITE_USER
                if not who
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
            f'messages max_attachment_size; a managed service has fixed limits, often 1 MB, for messages 10 MB'
        )
    if status == 500 and reason == _NO_NUMBER:
        return RequestRefused(f'{where}: a number in the document is larger than CouchDB can hold')
    if status >= 500 or status == 429:
        kind = ViewFailed if body_of(response).get('error') == _VIEW_FAILED else ServerUnavailable
        return kind(f'{where} responded with status {status}: {reason}')
    if status == 400 and where.startswith('http:') and re.search(b'HTTPS|SSL', response.content):
        return NotCouchDB(f'{where}: {_TLS_WANTED}')
    return RequestRefused(f'{where} responded with status {status}: {reason}')


def not_offered(
    error: CouchDBError, path: str, server: str, session: Callable[[], dict[str, Any]], *, is_of_server: bool
) -> NotOffered | None:
    """Return the error if a request failed because the service does not offer the endpoint at `path`, or else None.

    `server` is its URL, and `is_of_server` tells whether the path is relative to it. CouchDB refuses no endpoint to a
    server administrator. So after a refusal the service is asked who the user is: `session` is `Client.session`.
    """
    endpoint = path.removeprefix('/').partition('/')[0]
    if endpoint not in _ENDPOINTS:
        return None
    if error.status == 403:
        is_missing = endpoint == '_session' or _is_administrator(session)
    else:
        # An endpoint of the server that does not exist may look like a missing database.
        is_missing = error.status in (404, 405, 501) and (is_of_server or not isinstance(error, DatabaseMissing))
    return NotOffered(f'{server} does not offer {endpoint}: {_ENDPOINTS[endpoint]}') if is_missing else None


def _is_administrator(session: Callable[[], dict[str, Any]]) -> bool:
    """Tell whether the user is a server administrator; True, too, if the service does not say."""
    try:
        return '_admin' in session()['roles']
    except NotOffered:
        return True


def reason_of(response: requests.Response) -> str:
    """Return the server's reason for a status of 400 or more, in one line of at most 300 characters."""
    body = body_of(response)
    return one_line(body.get('reason') or body.get('error') or response.reason or '')[:300]


def is_account_lock(reason: str) -> bool:
    """Tell whether CouchDB has locked the user for this network address. It then refuses the right password, too."""
    return reason.startswith('Account is temporarily locked')


def from_answer(answer: dict[str, Any], where: str) -> CouchDBError:
    """Return the error for one document in a response to `_bulk_docs`."""
    kind = _DECISIONS.get(str(answer.get('error')), ServerUnavailable)
    return kind(f'{where}: {one_line(answer.get("error"))}: {one_line(answer.get("reason"))[:300]}')


def _tls(reason: str) -> str:
    return next(meaning for pattern, meaning in _TLS.items() if re.search(pattern, reason))


def body_of(response: requests.Response) -> dict[str, Any]:
    """Return the members of the JSON object in a response; none if it is something else."""
    try:
        body = response.json()
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def one_line(text: Any) -> str:
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
    text = one_line(str(seen).split('\n')[0])
    return re.sub(r'^.*?(>|\)): ', '', text)[:200] or type(seen).__name__  # without urllib3's name of the connection
