"""Waiting jobs are moved and edited; jobs that do not wait are refused in one sentence."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Queue

from celery_couchdb.jobs import Jobs
from kombu_couchdb.admin.listing import JobFilter, listing
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import workitem
from kombu_couchdb.errors import ConfigurationError, NotChangeable
from tests.conftest import wait_for
from tests.support import Inbox, items

from .conftest import Connect


def declare(connection: Connection, name: str) -> None:
    """Declare a queue."""
    Queue(name)(connection.default_channel).declare()


def test_job_moves_to_another_queue(app: Celery, connect: Connect, client: Client) -> None:
    connection = connect()
    declare(connection, 'other')
    first, second = Inbox(connection, 'celery', ack=False), Inbox(connect(), 'other')
    task_id = app.send_task('report', (1,), countdown=3600).id
    Jobs(app).move(task_id, queue='other', countdown=0)
    second.wait(1)
    assert second.messages[0].headers['id'] == task_id
    assert second.messages[0].delivery_info['routing_key'] == 'other'  # a retry is sent there
    assert first.drain(0.5).messages == []


def test_job_moves_to_another_date(app: Celery, connect: Connect, client: Client) -> None:
    known = Jobs(app)
    task_id = app.send_task('report', countdown=3600).id
    inbox = Inbox(connect(), 'celery')
    inbox.drain(0.5)
    date = datetime.now(timezone.utc) + timedelta(seconds=1)
    assert known.move(task_id, eta=date.replace(tzinfo=None))['date'] == date.timestamp()
    assert known.state(task_id) == 'scheduled'
    inbox.wait(1)
    assert inbox.times[0] >= date.timestamp() - 0.1
    assert inbox.messages[0].headers['eta'] == date.isoformat()


def test_job_gets_another_priority(app: Celery, connect: Connect, client: Client) -> None:
    ids = [app.send_task('report').id for _ in range(3)]
    Jobs(app).move(ids[2], priority=9)
    inbox = Inbox(connect(), 'celery', prefetch=1)
    inbox.wait(3)
    assert [message.headers['id'] for message in inbox.messages] == [ids[2], *ids[:2]]
    assert inbox.messages[0].properties['priority'] == 9


@pytest.mark.parametrize('size', [1, 50_000], ids=['inline', 'attached'])
def test_job_gets_other_arguments(app: Celery, connect: Connect, client: Client, size: int) -> None:
    known = Jobs(app)
    task_id = app.send_task('report', (1, 'x' * (50_001 - size)), {'shop': 'a'}).id
    known.edit(task_id, args=[2, 'y' * size])
    [item] = items(client)
    assert known.decode(item)[:2] == [[2, 'y' * size], {'shop': 'a'}]
    known.edit(task_id, kwargs={'shop': 'é'})
    inbox = Inbox(connect(), 'celery')
    inbox.wait(1)
    assert inbox.bodies[0][:2] == [[2, 'y' * size], {'shop': 'é'}]
    assert inbox.messages[0].headers['kwargsrepr'] == "{'shop': 'é'}"
    assert inbox.messages[0].headers['argsrepr'].startswith("[2, 'y")


def test_arguments_are_encoded_as_the_message_was(app: Celery, client: Client) -> None:
    app.conf.accept_content = ['json', 'pickle']
    known, task_id = Jobs(app), app.send_task('report', (1,), serializer='pickle', compression='gzip').id
    [before] = items(client)
    known.edit(task_id, args=[2])
    [after] = items(client)
    assert after['message']['content-type'] == before['message']['content-type']
    assert known.decode(after)[0] == [2]


def test_content_that_the_app_does_not_accept_is_not_edited(app: Celery, client: Client) -> None:
    task_id = app.send_task('report', (1,), serializer='pickle').id
    before = items(client)
    with pytest.raises(ValueError, match='the app does not accept application/x-python-serialize'):
        Jobs(app).edit(task_id, args=[2])
    assert items(client) == before


def test_arguments_that_the_task_does_not_take_are_refused(app: Celery, report: Any, client: Client) -> None:
    task_id = report.apply_async((1,)).id
    before = items(client)
    with pytest.raises(NotChangeable, match=r'the task report does not take these arguments: .*positional argument'):
        Jobs(app).edit(task_id, args=[1, 2, 3])
    with pytest.raises(NotChangeable, match='the arguments cannot be encoded as application/json'):
        Jobs(app).edit(task_id, args=[object()])
    assert items(client) == before


def test_unique_job_is_edited_but_not_moved_to_another_queue(
    report: Any, app: Celery, connect: Connect, client: Client
) -> None:
    declare(connect(), 'other')
    task_id = report.apply_async((1,), job_key='k', countdown=3600).id
    with pytest.raises(NotChangeable, match='is a unique job, which cannot be moved to another queue'):
        Jobs(app).move(task_id, queue='other')
    Jobs(app).edit(task_id, args=[2])
    Jobs(app).move(task_id, countdown=0)
    inbox = Inbox(connect(), 'celery')
    inbox.wait(1)
    assert inbox.bodies[0][0] == [2]


def test_job_that_does_not_wait_is_refused(app: Celery, connect: Connect, client: Client) -> None:
    known = Jobs(app)
    inbox = Inbox(connect(keep_done=60), 'celery', ack=False)
    names = {state: app.send_task('report', queue=None).id for state in ('prefetched', 'done', 'dead')}
    inbox.wait(3)
    by_id = {message.headers['id']: message for message in inbox.messages}
    by_id[names['done']].ack()
    by_id[names['dead']].reject()
    wait_for(lambda: [known.state(names[state]) for state in names] == list(names), 'the states')
    refusals = {'prefetched': 'a worker holds it', 'done': 'it is done', 'dead': 'it is a dead letter.*failures retry'}
    for state, why in refusals.items():
        with pytest.raises(NotChangeable, match=f'cannot be changed: {why}'):
            known.move(names[state], priority=1)
        with pytest.raises(NotChangeable, match=f'cannot be changed: {why}'):
            known.edit(names[state], args=[])
    with pytest.raises(NotChangeable, match='job unknown cannot be changed: it is not in a queue'):
        known.move('unknown', priority=1)


def test_wrong_value_is_refused(app: Celery, client: Client) -> None:
    known, task_id = Jobs(app), app.send_task('report').id
    before = items(client)
    moves: list[tuple[dict[str, Any], str]] = [
        ({}, 'nothing to change'),
        ({'queue': 'typo'}, "there is no queue 'typo'"),
        ({'priority': 10}, 'the priority must be a whole number from 0 to 9, not 10'),
        ({'priority': 1.5}, 'the priority must be a whole number from 0 to 9, not 1.5'),
        ({'eta': '2030-01-01'}, "the due date must be a datetime or None, not '2030-01-01'"),
        ({'countdown': float('nan')}, 'the countdown must be a number of seconds, not nan'),
        ({'eta': None, 'countdown': 1}, 'give eta or countdown, not both'),
        ({'countdown': 1e15}, 'is too long'),
    ]
    for options, why in moves:
        with pytest.raises(ConfigurationError, match=why):
            known.move(task_id, **options)
    edits: list[dict[str, Any]] = [{'args': 'ab'}, {'args': {'a': 1}}, {'kwargs': [1]}]
    for options in edits:
        with pytest.raises(ConfigurationError, match='args must be a'):
            known.edit(task_id, **options)
    assert items(client) == before


def test_job_that_waits_for_a_slot(app: Celery, connect: Connect, client: Client) -> None:
    """A moved job is not woken in the place of one that can run, and the next free slot goes to that one."""
    known, inbox = Jobs(app), Inbox(connect(), 'celery', ack=False)
    limit = {'headers': {'concurrency_key': 'k', 'concurrency_limit': 1}}
    app.send_task('report', (1,), **limit)
    inbox.wait(1)
    later, edited = app.send_task('report', (2,), **limit).id, app.send_task('report', (3,), **limit).id
    inbox.drain_until(lambda: sum('parked' in item for item in items(client)) == 2, 'both to wait for a slot')
    listed = listing(client, JobFilter(['prefetched', 'parked']), 10)
    assert [bool(item.get('parked')) for item in listed] == [False, True, True]
    assert 'parked' not in known.move(later, countdown=3600, priority=9)
    assert known.state(later) == 'scheduled'
    known.edit(edited, args=[4])
    inbox.messages[0].ack()
    inbox.wait(2)
    assert inbox.bodies[1][0] == [4]


def test_job_is_not_moved_beyond_its_expiry(app: Celery, client: Client) -> None:
    task_id = app.send_task('report', expires=60).id
    with pytest.raises(NotChangeable, match='expires before it would be due'):
        Jobs(app).move(task_id, countdown=3600)


def test_claim_and_edit_exclude_each_other(app: Celery, connect: Connect, client: Client) -> None:
    """A worker that claims the job between the read and the write of an edit: the edit is refused."""
    known, task_id = Jobs(app), app.send_task('report', (1,)).id
    [item] = items(client)
    decode = known.decode

    def claimed_meanwhile(doc: Any) -> Any:
        if doc['_rev'] == item['_rev']:
            client.bulk([workitem.claim(doc, 'broker:consumer:x', time.time())])
        return decode(doc)

    known.decode = claimed_meanwhile  # type: ignore[method-assign]
    with pytest.raises(NotChangeable, match='a worker holds it'):
        known.edit(task_id, args=[2])
    [after] = items(client)
    assert decode(after)[0] == [1]
