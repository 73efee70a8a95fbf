"""The watched documents (`waiting.watched`)."""

from __future__ import annotations

from typing import Any

import pytest

from celery_couchdb.waiting.read_ahead import Cache
from celery_couchdb.waiting.watched import ResultMailbox, Watched
from kombu_couchdb.errors import RequestRefused


def doc(doc_id: str, status: str, value: Any = 1) -> dict[str, Any]:
    return {'_id': doc_id, '_rev': '1-x', 'status': status, 'value': value}


def deliver(watched: Watched, *docs: dict[str, Any]) -> int:
    return watched.deliver((each['_id'], each) for each in docs)


def test_states_are_kept_while_they_are_watched_ahead() -> None:
    cache, mailbox = Cache(lambda: 0.0), ResultMailbox()
    watched = Watched(cache)
    assert watched.add(mailbox, ['now'], 'abc')
    assert watched.take_unread() == {'now', *'abc'}
    number = deliver(watched, doc('a', 'STARTED'), doc('b', 'SUCCESS'), doc('d', 'SUCCESS'))
    assert number == 1
    assert watched.ahead == {'a': doc('a', 'STARTED'), 'c': None}
    assert ['b' in cache, 'd' in cache] == [True, False]
    assert not watched.add(mailbox, ['a', 'b'], 'xyz')  # known: nothing must be read
    assert mailbox.receive(0) == [doc('a', 'STARTED'), doc('b', 'SUCCESS')]
    assert watched.take_unread() == set()


def test_mailbox_gets_each_revision_once_and_errors_last() -> None:
    mailbox, started = ResultMailbox(), doc('a', 'STARTED')
    for item in (started, started, RequestRefused('no'), doc('b', 'SUCCESS')):
        mailbox.deliver(item)
    assert mailbox.receive(0) == [started]
    assert mailbox.receive(0) == [doc('b', 'SUCCESS')]
    with pytest.raises(RequestRefused):
        mailbox.receive(0)
    assert mailbox.receive(0) == []
