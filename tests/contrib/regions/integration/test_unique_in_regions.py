"""Unique jobs in another region: they run once, and those that are merged answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from celery_couchdb.testing import Server
from tests.conftest import wait_for
from tests.regions import Region, Regions, killed_after, new_link, regions_on
from tests.support import Inbox, items


@pytest.fixture
def regions(server: Server) -> Iterator[Regions]:
    with regions_on(server, 'eu', 'us') as regions:
        yield regions


def send(region: Region, task_id: str, to: str = 'eu') -> Any:
    return region.app.send_task('add', (1, 2), task_id=task_id, region=to, headers={'job_key': 'k'})


def complete(region: Region) -> list[str]:
    """Let a consumer complete all messages, and return the ids of the tasks."""
    with region.app.connection_for_read() as connection:
        inbox = Inbox(connection, 'celery')
        inbox.drain_until(lambda: not items(region.broker), 'all messages to be completed')
        return [message.headers['id'] for message in inbox.messages]


@pytest.mark.parametrize('writes', range(4))
def test_job_runs_once_if_the_leader_is_killed(regions: Regions, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    us, eu = regions['us'], regions['eu']
    send(us, 'far')
    with ExitStack() as stack:
        killed = stack.enter_context(new_link(eu.app, 'us'))
        with killed_after(writes, monkeypatch):
            killed.step()
        ran = complete(eu)
        send(eu, 'near', to='eu')
        ran += complete(eu)
        successor = stack.enter_context(new_link(eu.app, 'us'))
        successor.step()
        ran += complete(eu)
    assert sorted(ran) == ['far', 'near']


def test_job_that_is_merged_into_another_one_answers(regions: Regions) -> None:
    us, eu = regions['us'], regions['eu']
    send(us, 'first')
    regions.work('eu')
    result = send(us, 'second')
    regions.work('eu')
    assert eu.tasks() == ['first']
    regions.work('us')
    wait_for(lambda: result.state == 'REVOKED', 'the answer')
    assert 'task first runs for both' in str(result.result)
    assert [doc['id'] for doc in us.records()] == ['first']
    assert complete(eu) == ['first']


@pytest.mark.parametrize('is_taken', [False, True])
def test_cancelled_job_answers_at_once_only_if_it_was_not_taken(regions: Regions, is_taken: bool) -> None:
    us, eu = regions['us'], regions['eu']
    send(us, 'one')
    if is_taken:
        regions.link('eu', 'us').step()
    us.regions.bulk([{**doc, 'cancelled': 1.0, 'state': 'there' if is_taken else 'sent'} for doc in us.records()])
    regions.work('eu')
    assert len(eu.returning()) == (not is_taken)
    assert eu.tasks() == (['one'] if is_taken else [])
