"""What passes from the I/O thread to kombu's (`kombu_couchdb.consumer.mailbox`)."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest

from kombu_couchdb.consumer.mailbox import Mailbox
from tests.conftest import PATIENCE


@pytest.fixture
def mailbox() -> Iterator[Mailbox[str]]:
    mailbox = Mailbox[str]()
    yield mailbox
    mailbox.close()


def readable(mailbox: Mailbox[str]) -> bool:
    """What an event loop sees."""
    return bool(select.select([mailbox.fileno()], [], [], 0)[0])


def test_first_in_is_first_out(mailbox: Mailbox[str]) -> None:
    mailbox.put(['a', 'b'])
    mailbox.put(['c'])
    assert len(mailbox) == 3
    assert [mailbox.pop() for _ in range(5)] == ['a', 'b', 'c', None, None]
    assert len(mailbox) == 0


def test_it_is_readable_until_it_was_found_empty(mailbox: Mailbox[str]) -> None:
    assert not readable(mailbox)
    for item in 'abc':
        mailbox.put([item])
    while mailbox.pop():
        assert readable(mailbox)
    assert not readable(mailbox)


def test_it_wakes_anew_after_it_was_empty(mailbox: Mailbox[str]) -> None:
    for _ in range(3):
        mailbox.put(['a'])
        assert readable(mailbox)
        assert [mailbox.pop(), mailbox.pop()] == ['a', None]
        assert not readable(mailbox)


def test_a_thousand_items_are_one_wake(mailbox: Mailbox[str]) -> None:
    for _ in range(1000):
        mailbox.put(['a'])
    assert mailbox._reader.recv(5000, socket.MSG_PEEK) == b'\0'


def test_nothing_wakes_nobody(mailbox: Mailbox[str]) -> None:
    mailbox.put([])
    assert not readable(mailbox)
    assert not mailbox.wait(0.0)


def test_waiting_takes_nothing_away(mailbox: Mailbox[str]) -> None:
    mailbox.put(['a'])
    assert mailbox.wait(0.0)
    assert mailbox.wait(None)
    assert readable(mailbox)
    assert mailbox.pop() == 'a'


@pytest.mark.parametrize('timeout', [0.0, -1.0, 0.002])
def test_waiting_ends_at_its_time(mailbox: Mailbox[str], timeout: float) -> None:
    assert mailbox.wait(timeout) is False


def test_waiting_ends_when_something_comes(mailbox: Mailbox[str]) -> None:
    thread = threading.Thread(target=mailbox.put, args=(['a'],))
    thread.start()
    assert mailbox.wait(PATIENCE)
    assert mailbox.pop() == 'a'
    thread.join()


def test_a_wait_that_ends_leaves_the_descriptor_readable(mailbox: Mailbox[str]) -> None:
    mailbox.put(['a'])
    mailbox.discard(lambda item: True)
    assert mailbox.wait(PATIENCE)  # for the signal alone
    assert readable(mailbox)
    assert mailbox.pop() is None
    assert not readable(mailbox)


def test_a_short_wait_does_not_shorten_the_next_read(mailbox: Mailbox[str]) -> None:
    assert not mailbox.wait(0.0)
    mailbox.put(['a'])
    assert [mailbox.pop(), mailbox.pop()] == ['a', None]


def test_what_is_unwanted_is_given_back_and_the_rest_keeps_its_order(mailbox: Mailbox[str]) -> None:
    mailbox.put(['a1', 'b1', 'a2', 'b2'])
    assert mailbox.discard(lambda item: item.startswith('a')) == ['a1', 'a2']
    assert [mailbox.pop() for _ in range(3)] == ['b1', 'b2', None]


def test_after_all_was_discarded_it_wakes_anew(mailbox: Mailbox[str]) -> None:
    mailbox.put(['a'])
    assert mailbox.discard(lambda item: True) == ['a']
    assert mailbox.pop() is None
    assert not readable(mailbox)
    mailbox.put(['b'])
    assert readable(mailbox)
    assert mailbox.pop() == 'b'


def test_closed_it_has_no_descriptor() -> None:
    mailbox = Mailbox[str]()
    mailbox.put(['a'])
    mailbox.close()
    mailbox.close()
    assert mailbox.fileno() == -1


def test_what_comes_after_it_was_closed_is_not_lost() -> None:
    """The I/O thread may be slower than who closes the connection, and gives back then what nobody took."""
    mailbox = Mailbox[str]()
    mailbox.put(['a'])
    mailbox.close()
    mailbox.put(['b'])
    assert mailbox.discard(lambda item: True) == ['a', 'b']
    mailbox.put(['c'])
    assert [mailbox.pop(), mailbox.pop()] == ['c', None]
