"""Actions on queues: pause, resume, purge and delete. The items are the names of queues."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kombu_couchdb.admin import queues
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ConfigurationError
from kombu_couchdb.queues.backlog import EMPTY, backlog

from .change import Part
from .fields import Field
from .selectable import ItemAction, Selectable


def _pause(
    client: Client, names: Sequence[str], *, by: str = '', reason: str | None = None, refuse: bool = False
) -> Iterator[Part]:
    for name in names:
        done = queues.pause(client, name, by=by or None, reason=reason, refuse=refuse)
        yield Part(1, {'paused' if done else 'was paused already|were paused already': 1}, {})


def _resume(client: Client, names: Sequence[str]) -> Iterator[Part]:
    for name in names:
        yield Part(1, {'resumed' if queues.resume(client, name) else 'was not paused|were not paused': 1}, {})


def _emptied(act: Callable[..., Iterator[int]]) -> Callable[..., Iterator[Part]]:
    """Return the function of an action which deletes messages of queues."""

    def function(client: Client, names: Sequence[str], **given: Any) -> Iterator[Part]:
        for name in names:
            try:
                yield from (Part(count, {'deleted': count}, {}) for count in act(client, name, **given))
                yield Part(0, {'deleted': 0}, {})
            except ConfigurationError as exc:
                yield Part(0, {}, {name: str(exc)})

    return function


def _messages(client: Client, names: Sequence[str]) -> int:
    """Return how many messages of queues no worker has claimed."""
    found = backlog(client)
    return sum(found.get(name, EMPTY)[state] for name in names for state in ('ready', 'scheduled', 'parked'))


_KEPT = 'What workers hold, and dead letters, are kept.'

_Action = ItemAction[Client, str]

PAUSE, RESUME, PURGE, DELETE = (
    _Action(
        'pause',
        'Pause',
        _pause,
        'Pause {}?',
        'Workers stop claiming messages within a second. Tasks that they run or have received go on, and messages can '
        'be published, and wait.',
        (
            Field(
                'refuse', 'Refuse new messages of programs', hint='Also let no program publish to them.', kind='check'
            ),
        ),
        is_signed=True,
    ),
    _Action('resume', 'Resume', _resume, 'Resume {}?', 'Workers claim messages again at once.', asks=False),
    _Action(
        'purge',
        'Purge',
        _emptied(queues.purging),
        'Purge {}?',
        f'The ready and scheduled messages are deleted for good. {_KEPT}',
        unit='message',
        amount=_messages,
        tone='bad',
    ),
    _Action(
        'delete',
        'Delete',
        _emptied(queues.deleting),
        'Delete {}?',
        f'The bindings and the ready and scheduled messages are deleted, too. {_KEPT} A queue that workers consume is '
        'kept.',
        unit='message',
        amount=_messages,
        tone='bad',
    ),
)

QUEUES: Selectable[Client, str] = Selectable(
    'queue',
    (PAUSE, RESUME, PURGE, DELETE),
    find=lambda client, names, exact: names,
    name_of=lambda client, name, arguments: name,
    client=lambda client: client,
)
