"""Reasons of dead letters.

The beginning of a reason is one of these constants, so that people and programs can tell the kinds apart. The rest is a
sentence about the single message.
"""

from __future__ import annotations

__all__ = ['DELIVERY_LIMIT', 'MALFORMED', 'NO_QUEUE', 'REJECTED', 'malformed', 'rejected', 'undecodable']

#: The document was changed by hand and is not valid any more, or its body cannot be read or decoded.
MALFORMED = 'malformed'
#: A worker rejected the message without requeueing it.
REJECTED = 'rejected'
#: The message was delivered as often as its queue allows.
DELIVERY_LIMIT = 'delivery limit'

#: The reason of a WorkItem whose queue is not text. The view `dead` writes the same.
NO_QUEUE = f'{MALFORMED}: queue is not text'


#: The maximum number of characters of the text of an error in a reason.
_MAX_LENGTH = 280


def malformed(detail: str) -> str:
    """Return the reason of a message that cannot be delivered."""
    return f'{MALFORMED}: {detail}'


def undecodable(error: object) -> str:
    """Return the reason of a message whose body cannot be decoded."""
    return malformed(f'the body cannot be decoded ({_one_line(str(error))})')


def rejected(detail: object) -> str:
    """Return the reason of a message that a worker rejected."""
    return f'{REJECTED}: {_one_line(detail)}'


def _one_line(detail: object) -> str:
    """Return a text, or the type and text of an exception, in one line that CouchDB can store."""
    try:
        text = f'{type(detail).__name__}: {detail}' if isinstance(detail, BaseException) else str(detail)
    except Exception:  # the text of another package's exception may fail
        text = type(detail).__name__
    return ' '.join(text.split())[:_MAX_LENGTH].encode('utf-8', 'replace').decode('utf-8')
