"""A job that is removed while a consumer holds it does not come back, whatever becomes of the consumer."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from celery import Celery

from celery_couchdb.jobs import Jobs
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import workitem
from tests.conftest import wait_for
from tests.support import Inbox, Peer, items

from .conftest import Connect


def held(app: Celery, connect: Connect) -> tuple[str, Inbox]:
    """Return a job that a consumer holds, and its inbox."""
    task_id = app.send_task('held').id
    inbox = Inbox(connect(), 'celery', ack=False)
    inbox.wait(1)
    return task_id, inbox


@pytest.mark.parametrize('decision', ['ack', 'requeue'])
def test_removed_job_is_deleted_when_its_consumer_decides(
    app: Celery, connect: Connect, client: Client, decision: str, caplog: pytest.LogCaptureFixture
) -> None:
    task_id, inbox = held(app, connect)
    assert [workitem.task_id(doc) for doc in Jobs(app).remove(task_id).claimed] == [task_id]
    with caplog.at_level(logging.WARNING):
        getattr(inbox.messages[0], decision)()
        wait_for(lambda: not items(client), 'the deletion')
        inbox.drain(0.5)
    assert len(inbox.messages) == 1
    assert 'may run again' not in caplog.text
    assert Jobs(app).state(task_id) == 'gone'


def test_removed_job_is_deleted_when_its_consumer_is_killed(
    app: Celery, url: str, connect: Connect, client: Client
) -> None:
    task_id = app.send_task('held').id
    with Peer(url, queue_name='celery', options={'visibility_timeout': 2}) as peer:
        assert 'got' in peer.next()
        [item] = items(client)
        Jobs(app).remove(task_id)
        peer.process.kill()
    other = Inbox(connect(visibility_timeout=2), 'celery')
    other.drain_until(lambda: not items(client), 'the deletion')
    assert other.drain(0.5).messages == []
    assert client.leaves(item['_id'])[0]['removed'] is True


def test_removed_unique_job_goes_on_with_the_next_message(
    report: Any, app: Celery, connect: Connect, client: Client
) -> None:
    first = report.apply_async((1,), job_key='k')
    inbox = Inbox(connect(), 'celery', ack=False)
    inbox.wait(1)
    second = report.apply_async((2,), job_key='k')
    assert second.outcome == 'again'
    Jobs(app).remove(first.id)
    inbox.messages[0].requeue()
    inbox.wait(2)
    assert inbox.messages[1].headers['id'] == second.id
    assert 'removed' not in items(client)[0]


def test_consumer_that_lost_its_lease_learns_what_was_removed(
    app: Celery, connect: Connect, client: Client, hooks: Any
) -> None:
    """Its process may have messages that it has not started: the worker must not start the removed ones."""
    told: list[str] = []
    hooks.on_removed(told.append)
    ids = [app.send_task('held').id for _ in range(2)]
    inbox = Inbox(connect(visibility_timeout=3.0), 'celery', ack=False)
    inbox.wait(2)
    Jobs(app).remove(ids[0])

    def expire() -> bool:  # as a sweep does; a heartbeat may be written at this moment
        [row] = client.id_range('broker:consumer:', docs=True)
        return client.bulk([{'_id': row['id'], '_rev': row['doc']['_rev'], '_deleted': True}])[0].is_stored

    wait_for(expire, 'the deletion of the heartbeat')
    inbox.drain_until(lambda: told, 'the removed job')
    assert told == [ids[0]]
