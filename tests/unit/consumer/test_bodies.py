"""Bodies that are attachments (`kombu_couchdb.consumer.bodies`), with a client whose reads fail."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from kombu_couchdb import errors
from kombu_couchdb.consumer import bodies
from kombu_couchdb.couchdb.bulk import RequestSize
from kombu_couchdb.couchdb.client import Client

from .test_unacked import ATTACHED, Desk


class Reads:
    """A client of which each read of an attachment fails with the next of `failures`."""

    address = SimpleNamespace(url='http://host/db')

    def __init__(self, failures: list[errors.CouchDBError]) -> None:
        self.failures, self.request_size = failures, RequestSize()

    def content(self, path: str, params: dict[str, str], size: int) -> bytes:
        if self.failures:
            raise self.failures.pop(0)
        return b'x' * size


@pytest.fixture
def desk() -> Iterator[Desk]:
    """A desk that holds a message whose body is not read yet."""
    desk = Desk()
    desk.subscribe()
    desk.claim(**ATTACHED)
    yield desk
    desk.mailbox.close()


def read_all(desk: Desk, failures: list[errors.CouchDBError]) -> None:
    """Read until the body, or the reason why there is none, is known."""
    client = cast(Client, Reads(failures))
    while desk.unacked.awaiting_bodies():
        try:
            bodies.deliver_some(client, desk.unacked)
        except errors.CouchDBError:
            pass


def test_body_that_fails_too_often_makes_a_dead_letter(desk: Desk) -> None:
    read_all(desk, [errors.BrokenAnswer('cut') for _ in range(bodies._MAX_FAILURES + 1)])
    assert desk.take() is None
    [letter] = desk.written()
    assert letter['reason'] == 'malformed: the attachment with the body cannot be read (cut)'


@pytest.mark.parametrize('last', [errors.BrokenAnswer('cut'), errors.RequestRefused('odd')])
def test_outages_do_not_make_a_body_unreadable(desk: Desk, last: errors.CouchDBError) -> None:
    outage: list[errors.CouchDBError] = [errors.ServerUnavailable('no response')] * (5 * bodies._MAX_FAILURES)
    read_all(desk, [*outage, last])
    delivery = desk.take()
    assert delivery is not None
    assert delivery.body == b'x' * 20_000
