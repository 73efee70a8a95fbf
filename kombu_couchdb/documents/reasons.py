"""The beginnings of the reasons of dead letters: people and programs tell by them why a message was not done.

The rest of a reason is one sentence about the very message.
"""

from __future__ import annotations

__all__ = ['DELIVERY_LIMIT', 'MALFORMED', 'NO_QUEUE', 'REJECTED', 'malformed', 'rejected', 'undecodable']

#: Somebody changed the message by hand, or its body cannot be read or decoded.
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
