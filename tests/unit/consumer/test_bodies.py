"""Bodies that are attachments (`kombu_couchdb.consumer.bodies`), with a client whose reads fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kombu_couchdb import errors
from kombu_couchdb.consumer import bodies
from kombu_couchdb.consumer.bodies import Bodies
from kombu_couchdb.consumer.unacked import Unacked
from kombu_couchdb.couchdb.bulk import RequestSize
from kombu_couchdb.couchdb.client import Client


class Reads:
    """A client of which each read of an attachment fails with the next of `failures`."""

    address = SimpleNamespace(url='http://host/db')

    def __init__(self, failures: list[errors.CouchDBError]) -> None:
        self.failures, self.request_size = failures, RequestSize()

    def content(self, path: str, params: dict[str, str], size: int) -> bytes:
        if self.failures:
            raise self.failures.pop(0)
        return b'x' * size


class Held:
    """The unacknowledged messages: one whose body is to be read."""

    def __init__(self) -> None:
        doc = {'_id': 'a', '_rev': '2-b', '_attachments': {'body': {'stub': True, 'length': 20_000}}}
        self.delivery, self.body = SimpleNamespace(tag='a', doc=doc), list[Any]()

    def awaiting_bodies(self) -> list[Any]:
        return [] if self.body else [self.delivery]

    def set_body(self, delivery: object, content: bytes | None, reason: str = '') -> None:
        self.body = [content, reason]


def read_all(failures: list[errors.CouchDBError]) -> list[Any]:
    """Read until the body, or the reason why there is none, is known, and return it."""
    held = Held()
    reading = Bodies(cast(Client, Reads(failures)), cast(Unacked, held))
    while not held.body:
        try:
            reading.deliver_some()
        except errors.CouchDBError:
            pass
    return held.body


def test_body_that_fails_too_often_makes_a_dead_letter() -> None:
    content, reason = read_all([errors.BrokenAnswer('cut') for _ in range(bodies._MAX_FAILURES + 1)])
    assert content is None
    assert reason == 'malformed: the attachment with the body cannot be read (cut)'


@pytest.mark.parametrize('last', [errors.BrokenAnswer('cut'), errors.RequestRefused('odd')])
def test_outages_do_not_make_a_body_unreadable(last: errors.CouchDBError) -> None:
    outage: list[errors.CouchDBError] = [errors.ServerUnavailable('no response')] * (5 * bodies._MAX_FAILURES)
    content, _ = read_all([*outage, last])
    assert content is not None
