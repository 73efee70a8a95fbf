"""Errors: one tree for both packages. `couchdb.failures` makes them from failed requests.

::

    CouchDBError
     ├── ServerUnavailable      no usable response: refused, cut off, timed out, 5xx, 429, account locked    retried
     │    ├── IndexNotReady     CouchDB builds the index of a view, and the request had to wait too long     retried
     │    ├── ViewFailed        CouchDB cannot process a document for a view                                 retried
     │    └── BrokenAnswer      the response is not one that CouchDB sends                                   retried
     │         └── AnswerTooLarge  the response is larger than the client reads                              retried
     ├── DatabaseMissing        404: the database does not exist; reconnecting creates it                    retried
     ├── AccessDenied           401, 403: somebody must change a password or a right
     ├── NotCouchDB             another service responds at this address
     ├── ConfigurationError     a URL, option or argument is wrong (also a ValueError)
     ├── DocumentTooLarge       413: the message or result exceeds a limit of the server
     ├── NotFound               404: the document does not exist
     ├── NotOffered             403, 404, 405, 501: a managed service lacks an endpoint for administrators
     ├── QueuePaused            an operator has paused the queue, and it takes no new messages
     ├── Conflict               409, 412: another process changed the document, or created the database, first
     ├── Unstorable             CouchDB cannot store this message, name or result (also a ValueError)
     └── RequestRefused         any other 4xx, and 500 for a number that CouchDB cannot hold: the request is wrong

kombu and Celery reconnect and retry on the errors in `RETRIED`, which are marked above. They do not retry other errors,
because a retry would fail again. The consumer's thread retries all but `AccessDenied` and `ConfigurationError`. No
error text contains a password.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class CouchDBError(Exception):
    """Base class. Catch it to catch every error that `kombu_couchdb` and `celery_couchdb` raise."""

    #: The HTTP status of the response; None if no readable response arrived.
    status: int | None = None

    #: After a bulk write that needed several requests: the results of the requests before the one that failed.
    answered: Sequence[Any] = ()


class ServerUnavailable(CouchDBError, ConnectionError):
    """The server gave no usable response; a write may or may not be stored. kombu and Celery reconnect and retry."""

    #: True if the connection could not be opened or was closed (DNS, TCP, TLS). Reads are then sent once more, or once
    #: to each other node: servers and proxies also close idle connections.
    was_cut = False


class IndexNotReady(ServerUnavailable):
    """CouchDB builds the index of a view, and the request had to wait for longer than its limit. Retried."""


class ViewFailed(ServerUnavailable):
    """CouchDB's view server ended or ran out of time, usually because of one document. Retried.

    The next workers that use the database look for the document, and set it aside.
    """


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


class NotOffered(CouchDBError):
    """A managed service does not offer an endpoint for administrators; the text says what that means. Not retried.

    Commands report it and do the rest.
    """


class QueuePaused(CouchDBError):
    """The queue is paused and takes no new messages; the text says by whom, why and what ends it. Nothing is stored.

    Not retried. `queues.topology.Topology.check_accepts` raises it.
    """


class Conflict(CouchDBError):
    """Another process changed the document after it was read. Not retried."""


class Unstorable(CouchDBError, ValueError):
    """CouchDB cannot store a part of this message, name or result; the text says which. Nothing is sent or retried."""


class RequestRefused(CouchDBError):
    """The server refused the request as malformed. Not retried."""


class NotChangeable(CouchDBError, ValueError):
    """A job cannot be changed, because it does not wait or does not take the change; the text says why. Not retried."""


#: kombu and Celery reconnect and retry on these errors.
RETRIED: tuple[type[Exception], ...] = (ServerUnavailable, DatabaseMissing)


#: The advice when the URL names no user.
WRITE_USER = 'write couchdb://user:password@host:port/db'

#: Who sends requests then.
NOBODY = 'nobody (no user in the URL)'


def access_denied(where: str, who: str | None, what: str, remedy: str) -> AccessDenied:
    """Return the error for a user without the right to do `what`.

    `who` describes the user; None means that there is none, and the text asks for one. Else `remedy` says what to
    change.
    """
    if who:
        return AccessDenied(f'{where}: {who} may not {what}; {remedy}')
    return AccessDenied(f'{where}: no user in the URL, and without one nobody may {what}; {WRITE_USER}')


def account_locked(where: str, who: str | None) -> ServerUnavailable:
    """Return the error for a locked user. The lock ends by itself after at most five minutes, so retrying helps."""
    return ServerUnavailable(
        f'{where} has locked {who or NOBODY} for up to five minutes, since wrong passwords for it came from '
        f'this network address; find who sends them, or give each site a user of its own'
    )
