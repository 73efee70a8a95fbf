"""Dead letters, including those of unique jobs: list, replay and drop."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from kombu import Connection

from celery_couchdb.jobs import Jobs
from kombu_couchdb.admin import dead
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import dead_letter, workitem
from kombu_couchdb.errors import Unstorable
from kombu_couchdb.transport import channel
from tests.conftest import wait_for
from tests.support import Inbox, items, publish

from .conftest import Connect, kill_all

JOB = 'job:["celery","report","k"]'


def test_dead_letters_are_replayed_at_the_end_of_their_queue(app: Celery, connect: Connect, client: Client) -> None:
    result = app.send_task('failing', expires=3600)
    app.backend.store_result(result.id, ValueError('once'), 'FAILURE')
    inbox = Inbox(connect(), 'celery', ack=False)
    kill_all(inbox, client, 1)
    waiting = app.send_task('waiting')
    inbox.wait(2)
    [letter] = dead.letters(client)
    back, refused = Jobs(app).replay([letter])
    assert (len(back), refused) == (1, {})
    assert result.state == 'PENDING'
    inbox.wait(3)
    message = inbox.messages[2]
    assert [one.headers['id'] for one in inbox.messages[1:]] == [waiting.id, result.id]
    assert message.properties['delivery_info']['redelivered'] is False
    assert message.headers['expires'] is None
    assert dead.count(client) == 0


def test_dead_letters_of_one_queue(connect: Connect, client: Client) -> None:
    connection = connect()
    for number in range(3):
        publish(connection, number, to='q')
    publish(connection, 'other', to='q2')
    kill_all(Inbox(connect(), 'q', 'q2', ack=False), client, 4)
    assert dead.count(client, dead.FailureFilter('q')) == 3
    assert {doc['message']['body'] for doc in dead.letters(client, dead.FailureFilter('q'))} == {'0', '1', '2'}
    assert len(dead.drop(client, list(dead.letters(client, dead.FailureFilter('q'))))) == 3
    assert [doc['message']['body'] for doc in items(client)] == ['"other"']


def letter(number: int, queue: str = 'q') -> dict[str, Any]:
    """Return a dead letter of five a second."""
    item = workitem.new(f'{queue}{number:03}', queue, {'body': '', 'headers': {}, 'properties': {}}, 1.0)
    return {**dead_letter.made_of(item, 'test', 1e9 + number // 5), 'consumer': 'x'}


def test_many_dead_letters_are_read_in_pages(client: Client, connection: Connection) -> None:
    connection.ensure_connection()
    client.bulk([letter(number) for number in range(250)])
    wait_for(lambda: len({doc['_id'] for doc in dead.letters(client)}) == 250, 'all dead letters to be listed')
    letters = dead.letters(client, dead.FailureFilter('q'))
    assert sum(len(dead.drop(client, [doc])) for doc in letters) == 250


def test_malformed_dead_letter_is_not_replayed(app: Celery, client: Client) -> None:
    message = {'headers': {'id': 'refused', 'task': 'report'}, 'properties': {}, 'body': {}}
    item = workitem.new('malformed', 'q', message, 1.0)
    client.put({**item, 'status': 'fail', 'reason': 'malformed: body', 'failed': 1e9})
    app.backend.store_result('refused', ValueError('once'), 'FAILURE')
    [letter] = dead.letters(client)
    back, refused = Jobs(app).replay([letter])
    assert back == []
    assert app.AsyncResult('refused').state == 'FAILURE'
    assert refused == {'malformed': 'it cannot be delivered: malformed: message.body must be text, or null'}
    assert dead.count(client) == 1


def test_second_replay_does_not_forget_the_result_of_the_first(app: Celery, connect: Connect, client: Client) -> None:
    result = app.send_task('failing')
    kill_all(Inbox(connect(), 'celery', ack=False), client, 1)
    letters = list(dead.letters(client))
    Jobs(app).replay(letters)
    app.backend.store_result(result.id, 'done', 'SUCCESS')
    assert Jobs(app).replay(letters) == ([], {letters[0]['_id']: 'it was changed by somebody else just now'})
    assert result.state == 'SUCCESS'


def test_dead_unique_job_is_replayed_while_another_runs(
    app: Celery, report: Any, connect: Connect, client: Client
) -> None:
    first = report.apply_async((1,), job_key='k')
    inbox = Inbox(connect(), 'celery', ack=False)
    kill_all(inbox, client, 1)
    second = report.apply_async((2,), job_key='k')
    inbox.wait(2)
    [letter] = dead.letters(client)
    back, refused = Jobs(app).replay([letter])
    assert (len(back), refused) == (1, {})
    inbox.messages[1].ack()
    inbox.wait(3)
    assert [message.headers['id'] for message in inbox.messages] == [first.id, second.id, first.id]
    assert dead.count(client) == 0


def test_dead_unique_job_that_two_replay_at_once_runs_once(
    app: Celery, report: Any, connect: Connect, client: Client
) -> None:
    """And the second one leaves the result as it is."""
    first = report.apply_async((1,), job_key='k')
    inbox = Inbox(connect(), 'celery', ack=False)
    kill_all(inbox, client, 1)
    report.apply_async((2,), job_key='k')
    inbox.wait(2)
    [letter] = dead.letters(client)
    assert dead.replay(client, [letter])[0] == [letter]
    inbox.messages[1].ack()
    inbox.wait(3)
    inbox.messages[2].ack()
    wait_for(lambda: not items(client), 'the ends')
    app.backend.store_result(first.id, 1, 'SUCCESS')
    Jobs(app).replay([letter])  # who has read the letter at the same moment
    assert (items(client), len(inbox.messages)) == ([], 3)
    assert first.result == 1


def test_dead_unique_job_is_not_replayed_while_another_waits(
    app: Celery, report: Any, connect: Connect, client: Client
) -> None:
    first = report.apply_async((1,), job_key='k')
    inbox = Inbox(connect(), 'celery', ack=False)
    kill_all(inbox, client, 1)
    Jobs(app).replay(list(dead.letters(client)))
    inbox.wait(2)
    inbox.messages[1].reject()
    wait_for(lambda: dead.count(client) == 1)
    inbox.consumer.cancel()
    second = report.apply_async((2,), job_key='k', countdown=3600)
    assert second.outcome == 'enqueued'
    [letter] = dead.letters(client)
    assert workitem.task_id(letter) == first.id
    [item] = [doc for doc in items(client) if not doc.get('status')]
    app.backend.store_result(first.id, ValueError('once'), 'FAILURE')
    back, refused = Jobs(app).replay([letter])
    assert back == []
    assert app.AsyncResult(first.id).state == 'FAILURE'
    assert refused == {letter['_id']: 'another message with its job key waits'}
    assert items(client) == [letter, item]


def test_reject_in_an_exception_handler_records_the_exception(
    connection: Connection, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    publish(connection, 'hello')
    inbox = Inbox(connection, ack=False)
    inbox.wait(1)
    try:
        raise ValueError('no such card')
    except ValueError:
        inbox.messages[0].reject()
    [doc] = wait_for(lambda: [doc for doc in items(client) if doc.get('status')], 'the dead letter')
    assert doc['reason'] == 'rejected: ValueError: no such card'
    assert f'message {doc["_id"]} was made a dead letter: rejected: ValueError: no such card' in caplog.text


def test_body_that_decompresses_to_too_much_becomes_a_dead_letter(
    connection: Connection, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Unstorable, match='the message is compressed too well'):
        publish(connection, '0' * 50_000_000, compression='gzip')
    monkeypatch.setattr(channel, 'check_unpacked', lambda *args: None)
    publish(connection, '0' * 50_000_000, compression='gzip')
    publish(connection, 'hello', compression='gzip')
    inbox = Inbox(connection)
    assert inbox.wait(1) == ['hello']
    [doc] = wait_for(lambda: [doc for doc in items(client) if doc.get('status')], 'the dead letter')
    assert doc['reason'].startswith(
        'malformed: the body cannot be decoded (it decompresses to more than 16,000,000 bytes'
    )
