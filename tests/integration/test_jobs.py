"""Jobs by their task ids: find them, watch them without polling, remove them, and read their messages."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.exceptions import TaskRevokedError
from kombu.pidbox import Mailbox

from celery_couchdb.jobs import Jobs, Unreadable
from kombu_couchdb import design
from kombu_couchdb.admin.jobs import OPEN
from kombu_couchdb.admin.listing import JobFilter, listing
from kombu_couchdb.couchdb.client import Client, Row
from kombu_couchdb.documents import workitem
from kombu_couchdb.errors import ConfigurationError
from tests.conftest import PATIENCE, wait_for
from tests.support import Inbox, Request, items

from .conftest import Connect, kill_all

JOB = 'job:["celery","report","k"]'


# -- states


def test_state_of_a_job(app: Celery, connect: Connect, client: Client) -> None:
    names = {
        name: app.send_task(
            name,
            countdown=3600 if name == 'scheduled' else None,
            queue='held' if name in ('prefetched', 'dead') else None,
        ).id
        for name in ('prefetched', 'dead', 'ready', 'scheduled')
    }
    inbox = Inbox(connect(), 'held', ack=False)
    inbox.wait(2)
    next(message for message in inbox.messages if message.headers['id'] == names['dead']).reject()
    known = Jobs(app)
    wait_for(lambda: known.state(names['dead']) == 'dead')
    assert {name: known.state(task_id) for name, task_id in names.items()} == {name: name for name in names}
    assert known.state('never sent') == 'gone'
    next(message for message in inbox.messages if message.headers['id'] == names['prefetched']).ack()
    wait_for(lambda: known.state(names['prefetched']) == 'gone')


def test_watch_a_job_from_scheduled_to_completed(
    app: Celery, connect: Connect, client: Client, sent: list[Request]
) -> None:
    task_id = app.send_task('watched', countdown=3600).id
    states: list[str] = []

    def watch() -> None:
        for state in Jobs(app).watch(task_id, PATIENCE):
            states.append(state)  # noqa: PERF402 - one at a time

    watching = threading.Thread(target=watch)
    watching.start()
    wait_for(
        lambda: states == ['scheduled'] and any(request.path == '/_changes' for request in sent), 'the first state'
    )
    before = len(sent)
    [item] = items(client)
    client.put({**item, 'date': time.time() + 1.5})  # no document is written when the message becomes due
    inbox = Inbox(connect(), 'celery', ack=False)
    inbox.wait(1)
    time.sleep(1)  # polling would send requests in this time
    inbox.messages[0].ack()
    watching.join(PATIENCE)
    assert [state for state in states if state != 'ready'] == ['scheduled', 'prefetched', 'gone']
    assert sum(request.path == '/_design/celery-jobs-v4/_view/by_task' for request in sent[before:]) <= 6


def test_wait_for_a_state(app: Celery, connect: Connect) -> None:
    task_id = app.send_task('waited for').id
    known = Jobs(app)
    with pytest.raises(TimeoutError, match=f'{task_id} is still ready'):
        known.wait(task_id, 'prefetched', timeout=0.2)
    inbox = Inbox(connect(), 'celery', ack=False)
    inbox.wait(1)
    assert known.wait(task_id, 'prefetched', timeout=PATIENCE) == 'prefetched'
    inbox.messages[0].ack()
    assert known.wait(task_id, 'dead', timeout=PATIENCE) == 'gone'


def test_watch_continues_through_a_retry(app: Celery, connect: Connect) -> None:
    """A retry is another message of the same task. The job exists all the time."""
    task_id = app.send_task('retried').id
    inbox = Inbox(connect(), 'celery', ack=False)
    inbox.wait(1)
    states = Jobs(app).watch(task_id, PATIENCE)
    assert next(states) == 'prefetched'
    app.send_task('retried', task_id=task_id, countdown=3600)
    inbox.messages[0].ack()
    assert next(states) == 'scheduled'


def test_job_that_one_node_of_a_cluster_lacks_is_found(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Just after a message is stored, a node may answer whose index lacks it."""
    task_id = app.send_task('stored on two of three nodes').id
    view, nodes = Client.view, iter(('behind',))

    def read(self: Client, *args: Any, **where: Any) -> list[Row]:
        return [] if next(nodes, '') == 'behind' else view(self, *args, **where)

    monkeypatch.setattr(Client, 'view', read)
    assert Jobs(app).state(task_id) == 'ready'


def test_database_without_the_design_document(app: Celery, client: Client) -> None:
    doc = client.get(f'_design/{design.JOBS}')
    client.bulk([{'_id': doc['_id'], '_rev': doc['_rev'], '_deleted': True}])
    with pytest.raises(ConfigurationError, match=r'lacks the design document .*couchdb setup'):
        Jobs(app).state('any')


# -- remove


def test_removed_jobs_do_not_run(app: Celery, client: Client) -> None:
    unwanted, planned = app.send_task('unwanted'), app.send_task('unwanted', countdown=3600)
    other = app.send_task('wanted')
    for result in (unwanted, planned):
        removal = Jobs(app).remove(result.id)
        assert [workitem.task_id(doc) for doc in removal.removed] == [result.id]
        assert removal.claimed == []
        with pytest.raises(TaskRevokedError, match='removed'):
            result.get(timeout=PATIENCE)
    assert [workitem.task_id(doc) for doc in items(client)] == [other.id]
    assert Jobs(app).remove(unwanted.id)[:4] == ([], [], [], [])


def test_removing_a_part_fails_its_chord(app: Celery) -> None:
    from celery import chord

    result = chord([app.signature('part', (number,)) for number in range(2)])(app.signature('body'))
    Jobs(app).remove(result.parent.results[0].id)
    assert result.parent.results[0].state == 'REVOKED'
    assert app.backend.chords.parts(result.parent.id, ordered=True)[0]['state'] == 'REVOKED'


def test_dead_letter_is_neither_removed_nor_revoked(
    app: Celery, connect: Connect, client: Client, broadcasts: Client
) -> None:
    """If workers revoked the task, they would refuse it after a replay."""
    result = app.send_task('failing')
    kill_all(Inbox(connect(), 'celery', ack=False), client, 1)
    removal = Jobs(app).remove(result.id)
    assert (removal.removed, removal.claimed, len(removal.dead)) == ([], [], 1)
    assert not broadcasts.id_range('broker:broadcast:')
    Jobs(app).remove('never there')
    assert broadcasts.id_range('broker:broadcast:')


def test_running_job_is_revoked_by_its_task_id_and_not_removed(
    app: Celery, connect: Connect, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers know a task by its own id, also if the command names the job's document."""
    result = app.send_task('running')
    Inbox(connect(), 'celery', ack=False).wait(1)
    [item] = items(client)
    revoked: list[str] = []
    monkeypatch.setattr(Mailbox, 'abcast', lambda mailbox, command, asked: revoked.extend(asked['task_id']))
    removal = Jobs(app).remove(item['_id'])
    assert removal.removed == []
    assert [workitem.task_id(doc) for doc in removal.claimed] == [result.id]
    Jobs(app).remove('acknowledged-early')
    assert revoked == [result.id, 'acknowledged-early']
    assert len(items(client)) == 1
    assert result.state == 'PENDING'


def test_job_claimed_during_its_removal_is_not_removed(
    app: Celery, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is claimed between the search and the deletion counts as running."""
    task_id, known = app.send_task('conflicted').id, Jobs(app)
    bulk = known.client.bulk

    def late(docs: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(known.client, 'bulk', bulk)
        Inbox(connect(), 'celery', ack=False).wait(1)
        return bulk(docs, **kwargs)

    monkeypatch.setattr(known.client, 'bulk', late)
    removal = known.remove(task_id)
    assert (removal.removed, len(removal.claimed)) == ([], 1)


def test_expired_result_has_no_state(app: Celery) -> None:
    results = app.backend.client
    for task_id in ('kept', 'expired'):
        app.backend.store_result(task_id, 1, 'SUCCESS')
    results.put({**results.get('celery-task-meta-expired'), 'expires': results.clock.now() - 60})
    assert Jobs(app).result_states(['kept', 'expired', 'missing']) == {'kept': 'SUCCESS'}


# -- unique jobs


def test_apply_async_returns_the_outcome(app: Celery, report: Any, connect: Connect, client: Client) -> None:
    first = report.apply_async((1,), job_key='k', countdown=3600)
    second = report.apply_async((2,), job_key='k')
    third = report.apply_async((3,), job_key='another')
    assert [result.outcome for result in (first, second, third)] == ['enqueued', 'moved', 'enqueued']
    assert second.id == first.id != third.id
    assert sorted(doc['_id'] for doc in items(client)) == ['job:["celery","report","another"]', JOB]
    inbox = Inbox(connect(), 'celery', ack=False)
    inbox.wait(2)
    again, moved = (report.apply_async((number,), job_key='k') for number in (4, 5))
    assert [result.outcome for result in (again, moved)] == ['again', 'moved']
    assert first.id != again.id == moved.id
    assert [Jobs(app).state(result.id) for result in (first, again)] == ['prefetched', 'ready']


def test_job_key_of_a_signature(app: Celery, report: Any, client: Client) -> None:
    report.signature((1,), job_key='k').delay()
    app.send_task('report', (2,), headers={'job_key': 'k'})
    [item] = items(client)
    assert report.apply_async((3,), headers={'job_key': 'k'}).outcome == 'moved'
    assert item['_id'] == JOB
    assert report.apply_async((1,)).id != workitem.task_id(item)
    assert len(items(client)) == 2


def test_task_of_a_unique_job_asks_whether_its_worker_holds_it(
    app: Celery, report: Any, connect: Connect, client: Client
) -> None:
    """Publishers change the document while the task runs: the claim counts, and that nobody has removed the job."""
    report.apply_async((1,), job_key='k')
    inbox, known = Inbox(connect(), 'celery', ack=False), Jobs(app)
    inbox.wait(1)
    request = Context(properties=inbox.messages[0].properties, called_directly=False)
    task = SimpleNamespace(name='report', acks_late=True, request=request)
    assert known.held(task)
    assert report.apply_async((2,), job_key='k').outcome == 'again'
    assert known.held(task)
    claimed = client.get(JOB)
    client.put({**claimed, 'claimed': {**claimed['claimed'], 'date': claimed['claimed']['date'] + 1}})
    assert not known.held(task)
    client.put({**client.get(JOB), 'claimed': claimed['claimed']})
    assert known.held(task)
    assert known.remove(JOB).claimed
    assert not known.held(task)


def test_removing_a_waiting_unique_job_keeps_the_running_one(
    app: Celery, report: Any, connect: Connect, client: Client
) -> None:
    first = report.apply_async((1,), job_key='k')
    inbox = Inbox(connect(), 'celery', ack=False)
    inbox.wait(1)
    second = report.apply_async((2,), job_key='k')
    known = Jobs(app)
    assert len(known.remove(second.id).removed) == 1
    assert (known.state(first.id), known.state(second.id), second.state) == ('prefetched', 'gone', 'REVOKED')
    inbox.messages[0].ack()
    wait_for(lambda: not items(client), 'the first job to be completed')


# -- messages


def test_body_is_decoded_if_the_app_accepts_its_content_type(app: Celery, client: Client) -> None:
    for options in ({'serializer': 'pickle'}, {'compression': 'zlib'}):
        app.send_task('task', (1, 'ü'), {'key': 'value'}, **options)
    pickled, compressed = items(client)
    with pytest.raises(Unreadable, match='does not accept application/x-python-serialize'):
        Jobs(app).decode(pickled)
    app.conf.accept_content = ['json', 'pickle']
    for item in (pickled, compressed):
        args, kwargs, _ = Jobs(app).decode(item)
        assert (tuple(args), kwargs) == ((1, 'ü'), {'key': 'value'})


def test_jobs_are_listed_by_state_and_queue(app: Celery, connect: Connect, client: Client) -> None:
    for number in range(5):
        app.send_task('task', queue=f'q{number % 2}')
    later = app.send_task('later', queue='q0', countdown=3600)
    Inbox(connect(), 'q1', ack=False).wait(2)

    def count(*states: str, queue: str | None = None, limit: int = 50) -> int:
        return len(list(listing(client, JobFilter(states, queue), limit)))

    wait_for(
        lambda: (count('ready'), count('prefetched'), count('scheduled'), count('dead')) == (3, 2, 1, 0), 'the jobs'
    )
    assert (count('ready', queue='q1'), count('prefetched', queue='q1'), count('ready', queue='q0')) == (0, 2, 3)
    assert (count('ready', 'prefetched', 'scheduled'), count('ready', limit=2)) == (6, 2)
    assert [workitem.task_id(doc) for doc in listing(client, JobFilter(('scheduled',), 'q0'), 10)] == [later.id]


def test_jobs_of_a_state_are_listed_by_time(app: Celery, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claimed ones by claim, ready ones by priority and then those that had a due date, scheduled ones by due date.

    The embedded server returns some dates a little larger than they are stored.
    """
    monkeypatch.setattr('kombu_couchdb.admin.jobs.BATCH_ROWS', 4)
    app.send_task('task')
    [like] = items(client)
    rev = like.pop('_rev')
    begin = client.clock.now() - 900
    docs, expected = list[Any](), list[Any]()
    for number in range(100):
        date = begin + number / 7
        doc = {**like, '_id': f'{number * 7 % 100:030x}', 'priority': number % 2, 'published': date}
        if kind := number % 4:
            doc |= ({'claimed': {'by': f'gone-{number % 3}', 'date': date}}, {'date': date}, {'date': date + 7200})[
                kind - 1
            ]
        docs.append(doc)
        expected.append(((1, 0, 2, 3)[kind], -doc['priority'] if kind == 0 else 0, date, doc['_id']))
    client.bulk([{**like, '_deleted': True, '_rev': rev}, *docs])
    found = [doc['_id'] for doc in listing(client, JobFilter(OPEN), 100)]
    assert found == [doc_id for *_, doc_id in sorted(expected)]
    assert [doc['_id'] for doc in listing(client, JobFilter(('ready', 'scheduled')), 60)] == found[25:85]
