"""Following the changes of a database: one report for each call, and one if something may have been missed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kombu_couchdb.couchdb.changes import Follower
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ServerUnavailable
from tests.conftest import PATIENCE, wait_for
from tests.support import Request


@pytest.fixture
def wakes() -> list[float]:
    return []


@pytest.fixture
def follower(client: Client, wakes: list[float]) -> Iterator[Follower]:
    follower = Follower(client, 'follower', lambda: wakes.append(time.monotonic()))
    yield follower
    follower.close()


def put(client: Client, *names: str) -> None:
    assert all(answer.is_stored for answer in client.bulk([{'_id': name, 'kind': name[0]} for name in names]))


def test_each_call_gives_one_report(follower: Follower, client: Client, wakes: list[float]) -> None:
    put(client, 'a1')
    follower.follow(client.sequence(), {'kind': 'a'})
    assert (follower.is_following, follower.take()) == (True, None)
    put(client, 'b1', 'a2')
    changes = follower.take(PATIENCE)
    assert changes is not None
    assert (changes.ids, follower.is_following, len(wakes)) == (['a2'], False, 1)
    put(client, 'a3')
    assert follower.take(0.2) is None  # no request is made until it is told to go on
    follower.follow(changes.last, {'kind': 'a'})
    changes = follower.take(PATIENCE)
    assert changes is not None
    assert changes.ids == ['a3']


def test_same_call_again_makes_no_request(follower: Follower, client: Client, sent: list[Request]) -> None:
    since = client.sequence()
    for _ in range(5):
        follower.follow(since, doc_ids=['a'])
    wait_for(lambda: [request for request in sent if request.path == '/_changes'], 'the request')
    put(client, 'b', 'a')
    changes = follower.take(PATIENCE)
    assert changes is not None
    assert changes.ids == ['a']
    assert sum(request.path == '/_changes' for request in sent) == 1


def test_outage_is_reported_and_attempts_become_rare(
    follower: Follower, client: Client, wakes: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    since = client.sequence()

    def away(*_: object, **__: object) -> None:
        raise ServerUnavailable('away')

    with monkeypatch.context() as patched:
        patched.setattr(client, 'open_changes', away)
        for _ in range(3):
            follower.follow(since)
            changes = follower.take(PATIENCE)
            assert changes is not None
            assert (changes.ids, changes.last, follower.is_following) == ([], None, False)
    assert wakes[1] - wakes[0] >= 0.4
    assert wakes[2] - wakes[1] >= 0.9
    put(client, 'a')
    follower.follow(since)
    changes = follower.take(PATIENCE)
    assert changes is not None
    assert changes.ids == ['a']


def test_pause_ends_the_wait_at_once(follower: Follower, client: Client) -> None:
    follower.follow(client.sequence())
    follower.pause()
    put(client, 'a')
    assert (follower.is_following, follower.take(0.2)) == (False, None)
