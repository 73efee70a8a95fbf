"""Completed messages that are kept (`keep_done`): what is kept, for how long, and that it never runs again."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, states
from kombu import Connection
from kombu.pidbox import Mailbox

from celery_couchdb.jobs import Jobs
from kombu_couchdb import design
from kombu_couchdb.admin import dead, jobs
from kombu_couchdb.admin.listing import JobFilter, listing
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import workitem
from kombu_couchdb.documents.idempotency import idempotent
from kombu_couchdb.documents.types import DoneItem
from kombu_couchdb.errors import ConfigurationError
from kombu_couchdb.leases.sweeper import Sweeper
from kombu_couchdb.queues.store import Store
from kombu_couchdb.queues.topology import Topology
from tests.conftest import PATIENCE, wait_for
from tests.support import Inbox, Request, items, leave_leaf, publish

from .conftest import Connect

DAY = 86400.0


def kept(client: Client) -> list[Any]:
    """Return the completed messages that are kept."""
    rows = client.request('GET', '/_all_docs', {'include_docs': True})['rows']
    return [row['doc'] for row in rows if row['doc'].get('type') == 'DoneItem']


def run(connection: Connection, client: Client, count: int = 1) -> Inbox:
    """Receive and acknowledge `count` tasks, and wait until that is stored."""
    inbox = Inbox(connection, 'celery')
    inbox.wait(count)
    wait_for(lambda: not items(client), 'the acknowledgements')
    return inbox


def test_completed_task_is_kept_with_its_times(app: Celery, connect: Connect, client: Client) -> None:
    task_id = app.send_task('report', (42,)).id
    [item] = items(client)
    inbox = run(connect(keep_done=DAY), client)
    [doc] = kept(client)
    assert {*DoneItem.__required_keys__, '_rev'} == {*doc}
    assert (doc['_id'], doc['status'], doc['attempts'], doc['queue']) == (item['_id'], 'done', 1, 'celery')
    assert doc['message'] == item['message']
    assert item['published'] <= doc['started'] <= doc['finished']
    assert doc['expires'] == doc['finished'] + DAY
    assert doc['consumer'].startswith('broker:consumer:')
    assert Jobs(app).state(task_id) == 'done'
    inbox.drain(1.0)
    assert len(inbox.messages) == 1


def test_argument_the_task_and_the_option_say_how_long_in_this_order(
    app: Celery, connect: Connect, client: Client, hooks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    hooks.keep_done_of({'long': 7 * DAY, 'wrong': 'x', 'never': 0}.get)
    for option in (0.0, DAY):
        connection = connect(keep_done=option)
        for name in ('long', 'wrong', 'never', 'other'):
            app.send_task(name)
        app.send_task('long', keep_done=60)
        app.send_task('long', keep_done=0)
        publish(connection, 'no task', 'celery')
        run(connection, client, 7)
        connection.release()
    found = sorted((str(workitem.task_name(doc)), round(doc['expires'] - doc['finished'])) for doc in kept(client))
    assert found == [('long', 60), ('long', 60), ('long', 7 * DAY), ('long', 7 * DAY), ('other', DAY)]
    assert 'completed messages of wrong are not kept: keep_done must be' in caplog.text


def test_wrong_time_is_refused(app: Celery, client: Client) -> None:
    for wrong in (-1, 'long', True, [3], 1e12):
        with pytest.raises(ConfigurationError, match='keep_done must be a number of seconds from 0 to'):
            app.send_task('report', keep_done=wrong)
    assert items(client) == []


def test_large_body_is_kept_as_it_is(app: Celery, connect: Connect, client: Client) -> None:
    task_id = app.send_task('report', ('x' * 50_000,)).id
    run(connect(keep_done=DAY), client)
    [doc] = jobs.find(client, task_id)
    assert doc['_attachments']['body']['stub']
    assert Jobs(app).decode(doc)[0] == ['x' * 50_000]


def test_kept_message_is_in_no_count_and_no_list_of_the_queue(app: Celery, connect: Connect, client: Client) -> None:
    task_id = app.send_task('report').id
    inbox = run(connect(keep_done=DAY), client)
    assert inbox.channel.queue_declare('celery', passive=True).message_count == 0
    assert inbox.channel.queue_purge('celery') == 0
    assert Store(client).drop_expired() == 0
    assert list(listing(client, JobFilter(jobs.STATES[:4]), 10)) == []
    [doc] = jobs.find(client, task_id)
    assert dead.replay(client, [doc]) == ([], {doc['_id']: 'it is no dead letter (any more)'})
    assert dead.drop(client, [doc]) == []
    assert jobs.remove(client, [task_id])[task_id] == ([], [], [], [doc], False)
    assert kept(client) == [doc]


def test_message_that_is_published_again_stays_done(app: Celery, connect: Connect, client: Client) -> None:
    for _ in range(2):
        with idempotent('due at noon'):
            app.send_task('report', task_id='noon')
        run(connect(keep_done=DAY), client, 0 if kept(client) else 1)
    assert len(kept(client)) == 1


def test_removal_of_a_done_job_revokes_it_only_if_it_may_run(
    app: Celery, connect: Connect, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been acknowledged before it ran."""
    sent = [app.send_task('report').id for _ in range(4)]
    run(connect(keep_done=DAY), client, 4)
    no_result, succeeded, started, terminated = sent
    app.backend.store_result(succeeded, None, states.SUCCESS)
    app.backend.store_result(started, None, states.STARTED)
    revoked: list[str] = []
    monkeypatch.setattr(Mailbox, 'abcast', lambda mailbox, command, arguments: revoked.extend(arguments['task_id']))
    removals = [Jobs(app).remove(task_id) for task_id in (no_result, started)]
    removals += [Jobs(app).remove(task_id, terminate=True) for task_id in (succeeded, terminated)]
    assert [removal.revoked for removal in removals] == [False, True, False, True]
    assert revoked == [started, terminated]
    assert all(len(removal.done) == 1 for removal in removals)
    assert len(kept(client)) == 4


def test_kept_message_is_swept_when_its_time_is_over(app: Celery, connect: Connect, client: Client) -> None:
    ids = [app.send_task('report', keep_done=seconds).id for seconds in (0.5, DAY)]
    run(connect(), client, 2)
    sweeper = Sweeper(Store(client), Topology(client), 60.0)

    def swept() -> bool:
        sweeper.sweep('broker:consumer:none', (), lambda: None)
        return len(kept(client)) == 1

    wait_for(swept, 'the sweep')
    [doc] = kept(client)
    assert workitem.task_id(doc) == ids[1]
    assert Jobs(app).state(ids[0]) == 'gone'


# -- unique jobs


def test_unique_job_is_kept_under_an_id_of_its_own(report: Any, connect: Connect, client: Client) -> None:
    connection = connect(keep_done=DAY)
    inbox = Inbox(connection, 'celery', ack=False)
    first = report.apply_async((1,), job_key='k')
    inbox.wait(1)
    assert report.apply_async((2,), job_key='k').outcome == 'again'
    inbox.messages[0].ack()
    inbox.wait(2)
    wait_for(lambda: [workitem.task_id(doc) for doc in kept(client)] == [first.id], 'the first to be kept')
    inbox.messages[1].ack()
    wait_for(lambda: not items(client), 'the second acknowledgement')
    assert len(kept(client)) == 2
    assert all(not workitem.is_unique(doc) and 'next' not in doc for doc in kept(client))
    assert report.apply_async((3,), job_key='k').outcome == 'enqueued'
    inbox.wait(3)
    assert len(kept(client)) == 2


# -- conflicts


def test_conflicting_claim_of_a_done_message_is_deleted(app: Celery, connect: Connect, client: Client) -> None:
    """Another node of a cluster has stored a claim, and shows it as the winner."""
    app.send_task('report')
    [item] = items(client)
    run(connect(keep_done=DAY), client)
    [doc] = kept(client)
    claim = {**item, 'claimed': {'by': 'broker:consumer:gone', 'date': 1.0}}
    leave_leaf(client, item['_id'], '4-f' + 'f' * 31, **{n: v for n, v in claim.items() if n not in ('_id', '_rev')})
    assert client.get(item['_id'])['type'] == 'WorkItem'
    store = Store(client)
    for change in store.resolve_conflict(client.leaves(item['_id']), ()) or ():
        assert client.bulk([change])[0].is_stored
    assert client.get(item['_id'])['_rev'] == doc['_rev']


# -- lists


def test_history_by_task_state_time_and_argument(app: Celery, connect: Connect, client: Client) -> None:
    names = [app.send_task(name, args, {'shop': name}).id for name, args in (('a', ('x-1',)), ('b', ('x-2',)))]
    run(connect(keep_done=DAY), client, 2)
    names.append(app.send_task('a', ('x-3',)).id)
    now = client.clock.now()

    def listed(states: Any = jobs.STATES, limit: int = 10, **more: Any) -> list[str | None]:
        return [workitem.task_id(doc) for doc in listing(client, JobFilter(states, **more), limit)]

    assert listed(('done',)) == names[1::-1]
    assert listed() == names[::-1]
    assert listed(limit=1) == names[2:]
    assert listed(task='a') == [names[2], names[0]]
    assert listed(('done',), task='a') == [names[0]]
    assert listed(args='x-2') == [names[1]]
    assert listed(args="'shop': 'b'") == [names[1]]
    assert listed(since=now + 60) == []
    assert len(listed(since=now - 60)) == 3
    assert listed(queue='other') == []


def test_history_of_more_than_a_page(app: Celery, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('kombu_couchdb.admin.jobs.BATCH_ROWS', 10)
    done = {'type': 'DoneItem', 'status': 'done', 'queue': 'celery', 'message': {'headers': {'task': 'many'}}}
    docs = [{**done, '_id': f'done{number:04}', 'finished': 1000.0 + number // 7} for number in range(45)]
    client.bulk(docs)
    found = list(listing(client, JobFilter(('done',), task='many'), 100))
    assert len({doc['_id'] for doc in found}) == len(found) == 45
    assert [doc['finished'] for doc in found] == [doc['finished'] for doc in reversed(docs)]
    assert len(list(listing(client, JobFilter(('done',), since=1006.0), 100))) == 3


def test_wait_for_many_jobs_shares_one_feed(app: Celery, connect: Connect, client: Client, sent: list[Request]) -> None:
    ids = [app.send_task('report').id for _ in range(10)]
    states = Jobs(app).watch_many(ids, PATIENCE)
    assert dict(next(states) for _ in ids) == dict.fromkeys(ids, 'ready')
    inbox = Inbox(connect(keep_done=DAY), 'celery')
    inbox.wait(10)
    assert Jobs(app).wait_many(ids, PATIENCE) == dict.fromkeys(ids, 'done')
    assert dict(states) == dict.fromkeys(ids, 'done')
    reads = [request for request in sent if str(request.path).endswith(f'{design.JOBS}/_view/by_task')]
    assert len(reads) < 10


def test_wait_for_many_jobs_says_which_one_has_not_ended(app: Celery, client: Client) -> None:
    ids = [app.send_task('report').id for _ in range(3)]
    with pytest.raises(TimeoutError, match=rf'job {ids[0]} is still ready, and 2 more have not ended'):
        Jobs(app).wait_many(ids, timeout=0.2)
