"""The queue from the I/O thread to kombu's thread (`kombu_couchdb.consumer.mailbox`)."""

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
    """Tell whether an event loop would see the mailbox as readable."""
    return bool(select.select([mailbox.fileno()], [], [], 0)[0])


def test_first_in_is_first_out(mailbox: Mailbox[str]) -> None:
    for item in 'abc':
        mailbox.put(item)
    assert len(mailbox) == 3
    assert [mailbox.pop() for _ in range(5)] == ['a', 'b', 'c', None, None]
    assert len(mailbox) == 0


def test_descriptor_is_readable_until_pop_finds_nothing(mailbox: Mailbox[str]) -> None:
    assert not readable(mailbox)
    for item in 'abc':
        mailbox.put(item)
    while mailbox.pop():
        assert readable(mailbox)
    assert not readable(mailbox)


def test_descriptor_becomes_readable_again(mailbox: Mailbox[str]) -> None:
    for _ in range(3):
        mailbox.put('a')
        assert readable(mailbox)
        assert [mailbox.pop(), mailbox.pop()] == ['a', None]
        assert not readable(mailbox)


def test_many_items_send_one_byte(mailbox: Mailbox[str]) -> None:
    for _ in range(1000):
        mailbox.put('a')
    assert mailbox._reader.recv(5000, socket.MSG_PEEK) == b'\0'


def test_wait_removes_nothing(mailbox: Mailbox[str]) -> None:
    mailbox.put('a')
    assert mailbox.wait(0.0)
    assert mailbox.wait(None)
    assert readable(mailbox)
    assert mailbox.pop() == 'a'


@pytest.mark.parametrize('timeout', [0.0, -1.0, 0.002])
def test_wait_ends_after_its_timeout(mailbox: Mailbox[str], timeout: float) -> None:
    assert mailbox.wait(timeout) is False


def test_wait_ends_when_an_item_arrives(mailbox: Mailbox[str]) -> None:
    thread = threading.Thread(target=mailbox.put, args=('a',))
    thread.start()
    assert mailbox.wait(PATIENCE)
    assert mailbox.pop() == 'a'
    thread.join()


def test_a_short_wait_does_not_shorten_the_next_read(mailbox: Mailbox[str]) -> None:
    assert not mailbox.wait(0.0)
    mailbox.put('a')
    assert [mailbox.pop(), mailbox.pop()] == ['a', None]


def test_closed_mailbox_has_no_descriptor() -> None:
    mailbox = Mailbox[str]()
    mailbox.put('a')
    mailbox.close()
    mailbox.close()
    assert mailbox.fileno() == -1


def test_items_put_after_close_are_kept() -> None:
    """The I/O thread may put deliveries after the connection was closed: it must go on to release them."""
    mailbox = Mailbox[str]()
    mailbox.close()
    mailbox.put('a')
    assert [mailbox.pop(), mailbox.pop()] == ['a', None]
