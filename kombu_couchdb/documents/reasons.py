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


def malformed(detail: str) -> str:
    """Return the reason of a message that cannot be delivered."""
    return f'{MALFORMED}: {detail}'


def undecodable(error: object) -> str:
    """Return the reason of a message whose body cannot be decoded."""
    return malformed(f'the body cannot be decoded ({error})')


def rejected(detail: str) -> str:
    """Return the reason of a message that a worker rejected."""
    return f'{REJECTED}: {detail}'
