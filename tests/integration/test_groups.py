"""Groups and headers of chords: their messages are stored in few requests, or the caller gets an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, chain, chord, group, signals
from kombu import Exchange, Queue
from kombu.exceptions import EncodeError, OperationalError

from celery_couchdb.patches import publishing
from celery_couchdb.unique import UniqueTask
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents.idempotency import idempotent
from kombu_couchdb.errors import ServerUnavailable
from kombu_couchdb.transport import batches
from tests.conftest import wait_for
from tests.support import Inbox, Request, items, replace_in_clients

RETRIES = {'interval_start': 0, 'interval_step': 0, 'max_retries': 3}


@pytest.fixture(autouse=True)
def fast_generators(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """On a busy machine any generator may be slow. Only tests with `slow` in their names are about that."""
    if 'slow' not in request.node.name:
        monkeypatch.setattr(publishing, '_GENERATOR_SECONDS', 3600.0)


@pytest.fixture
def add(app: Celery) -> Any:
    @app.task(name='add', shared=False)
    def add(left: int, right: int) -> int:
        return left + right

    add.delay(0, 0)  # declares the queue
    return add


def writes(sent: list[Request]) -> list[int]:
    """Return the number of messages in each request that publishes some."""
    found = [sum(doc.get('type') == 'WorkItem' for doc in request.docs) for request in sent]
    return [count for count in found if count]


def task_ids(client: Client) -> set[str]:
    return {item['message']['headers']['id'] for item in items(client)}


@pytest.mark.parametrize(
    ('publish', 'messages'),
    [
        (lambda add: group(add.s(number, 1) for number in range(50)).apply_async(), 50),
        (lambda add: chord([add.s(number, 1) for number in range(20)])(add.si(1, 1)).parent, 20),
        (lambda add: add.chunks([(number, 1) for number in range(40)], 10).apply_async(), 4),
    ],
    ids=['group', 'header of a chord', 'chunks'],
)
def test_messages_are_stored_in_one_request_and_in_order(
    add: Any, client: Client, sent: list[Request], publish: Callable[[Any], Any], messages: int
) -> None:
    sent.clear()
    result = publish(add)
    assert writes(sent) == [messages]
    stored = [item['message']['headers']['id'] for item in sorted(items(client), key=lambda item: item['_id'])]
    assert stored[1:] == [child.id for child in result.results]


def test_chains_groups_and_chords_within_a_group_share_its_request(
    add: Any, app: Celery, client: Client, sent: list[Request]
) -> None:
    sent.clear()
    parts = [
        add.s(1, 1),
        chain(add.s(1, 1), add.s(2)),
        group(add.s(1, 1), add.s(2, 2)),
        chain(chain(add.s(1, 1)), add.s(1)),
    ]
    group(parts).apply_async()
    assert writes(sent) == [5]
    sent.clear()
    group([add.s(1, 1), chord([add.s(1, 1), add.s(2, 2), add.s(3, 3)], add.si(0, 0))]).apply_async()
    assert sorted(writes(sent)) == [1, 3]
    [row] = app.backend.client.id_range('chord-unlock-', docs=True)
    assert row['doc']['size'] == 3


@pytest.mark.parametrize(('limit', 'value', 'size'), [('_MAX_DOCS', 5, 1), ('_MAX_CHARACTERS', 50_000, 9000)])
def test_generator_is_stored_in_parts(
    add: Any, sent: list[Request], monkeypatch: pytest.MonkeyPatch, limit: str, value: int, size: int
) -> None:
    monkeypatch.setattr(batches, limit, value)
    ahead = list[int]()

    def signatures() -> Iterator[Any]:
        for number in range(12):
            ahead.append(number - sum(writes(sent)))
            yield add.s('x' * size, 1)

    sent.clear()
    group(signatures()).apply_async()
    assert writes(sent) == [5, 5, 2]
    assert max(ahead) <= 7


@pytest.mark.parametrize('kind', ['group', 'chord'])
def test_tasks_of_a_slow_generator_are_stored_while_it_runs(add: Any, client: Client, kind: str) -> None:
    before = len(items(client))

    def signatures() -> Iterator[Any]:
        yield add.s(0, 1)
        yield add.s(1, 1)
        wait_for(lambda: len(items(client)) > before, 'the first task')  # Celery looks some tasks ahead
        yield add.s(2, 1)

    (group(signatures()) if kind == 'group' else chord(signatures(), add.si(0, 0))).apply_async()
    assert len(items(client)) == before + 3


def test_signals_are_sent_for_each_task_and_their_receivers_may_publish(add: Any, app: Celery, client: Client) -> None:
    """A task that a generator or a signal's receiver sends on its own is stored at once, with a producer of its own."""
    heard, stored = list[tuple[str, str]](), list[bool]()

    def signatures() -> Iterator[Any]:
        for number in range(3):
            stored.append(add.delay(7, 7).id in task_ids(client))
            yield add.s(number, 1)

    @signals.before_task_publish.connect(weak=False)
    def before(headers: dict[str, Any], **_: Any) -> None:
        if not headers['argsrepr'].startswith('(7'):
            heard.append(('before', headers['id']))
            stored.append(add.delay(7, 7).id in task_ids(client))

    @signals.after_task_publish.connect(weak=False)
    def after(headers: dict[str, Any], **_: Any) -> None:
        if not headers['argsrepr'].startswith('(7'):
            heard.append(('after', headers['id']))

    try:
        result = group(signatures()).apply_async()
    finally:
        signals.before_task_publish.disconnect(before)
        signals.after_task_publish.disconnect(after)
    assert heard == [(what, child.id) for child in result.results for what in ('before', 'after')]
    assert stored == [True] * 6


def test_tasks_go_to_their_own_queues(add: Any, app: Celery, client: Client, sent: list[Request]) -> None:
    exchange = Exchange('topics', type='topic')
    app.amqp.queues.add(Queue('both', exchange, routing_key='#'))
    app.amqp.queues.add(Queue('cats', exchange, routing_key='cat'))
    topic = {'exchange': 'topics', 'declare': [app.amqp.queues['both'], app.amqp.queues['cats']]}
    parts = [add.s(1, 1), add.s(1, 1).set(queue='other'), add.s(2, 2).set(routing_key='cat', **topic)]
    group(parts).apply_async()
    queues = [item['queue'] for item in items(client)]
    assert sorted(queues) == ['both', 'cats', 'celery', 'celery', 'other']
    assert writes(sent)[-1] == 4


def test_unique_jobs_in_a_group_know_their_outcome(app: Celery, client: Client) -> None:
    outcomes = list[str]()

    class Recording(UniqueTask):
        abstract = True

        def apply_async(self, *args: Any, **options: Any) -> Any:
            result = super().apply_async(*args, **options)
            outcomes.append(result.outcome)
            return result

    @app.task(name='recording', base=Recording, shared=False)
    def recording(number: int) -> None: ...

    group([recording.s(number).set(job_key='k') for number in range(3)]).apply_async()
    assert outcomes == ['enqueued', 'moved', 'moved']
    assert len(items(client)) == 1


def test_eager_group_publishes_nothing(add: Any, app: Celery, client: Client) -> None:
    app.conf.task_always_eager = True
    assert group(add.s(number, 1) for number in range(3)).apply_async().get() == [1, 2, 3]
    assert len(items(client)) == 1


def test_foreign_broker_is_untouched(url: str, client: Client) -> None:
    app = Celery('other', set_as_current=False, broker='memory://', backend=url)
    app.conf.task_default_queue = client.address.database  # all tests of a process share kombu's queues in memory
    assert app.backend is not None

    @app.task(name='add', shared=False)
    def add(left: int, right: int) -> int:
        return left + right

    group(add.s(number, 1) for number in range(3)).apply_async()
    with app.connection_for_read() as connection:
        assert connection.default_channel.queue_declare(client.address.database, passive=True).message_count == 3
    app.close()


# -- failures


def test_task_that_cannot_be_encoded_drops_the_group(add: Any, client: Client) -> None:
    before = task_ids(client)
    with pytest.raises(EncodeError):
        group([add.s(1, 1), add.s(2, 2), add.s(object(), 1)]).apply_async()
    assert task_ids(client) == before


def test_lost_response_is_retried_and_nothing_is_stored_twice(
    add: Any, client: Client, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All messages were stored although the response was lost, and a consumer has taken one of them since."""
    request, lost = Client.request, list[object]()

    def request_and_lose(self: Client, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        answer = request(self, method, path, *args, **kwargs)
        if path == '/_bulk_docs' and not lost:
            lost.append(answer)
            taken = Inbox(add.app.connection_for_read(), 'celery', prefetch=1)
            taken.wait(2)
            taken.connection.release()
            raise ServerUnavailable('the answer was lost')
        return answer

    replace_in_clients(monkeypatch, database, 'request', request_and_lose)
    result = group(add.s(number, 1) for number in range(5)).apply_async(retry=True, retry_policy=RETRIES)
    assert len(lost) == 1
    assert task_ids(client) == {child.id for child in result.results[1:]}
    assert len(items(client)) == 4


@pytest.fixture
def outage(add: Any, database: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let each request that writes messages fail; the list has the paths of these requests."""
    request, tries = Client.request, list[str]()

    def fail(self: Client, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        if method == 'PUT' or path == '/_bulk_docs':
            tries.append(path)
            raise ServerUnavailable('no response')
        return request(self, method, path, *args, **kwargs)

    replace_in_clients(monkeypatch, database, 'request', fail)
    return tries


@pytest.mark.parametrize('retry', [False, True], ids=['without retry', 'with retry'])
def test_outage_raises_the_error_of_publishing(add: Any, outage: list[str], client: Client, retry: bool) -> None:
    with pytest.raises(OperationalError):
        group(add.s(number, 1) for number in range(5)).apply_async(retry=retry, retry_policy=RETRIES)
    assert len(outage) == (4 if retry else 1)
    assert len(items(client)) == 1


def test_failure_while_a_slow_generator_runs_is_raised(add: Any, outage: list[str]) -> None:
    def signatures() -> Iterator[Any]:
        yield add.s(1, 1)
        yield add.s(2, 1)
        wait_for(lambda: outage, 'the failure')
        yield add.s(3, 1)

    with pytest.raises(OperationalError):
        group(signatures()).apply_async(retry=False)


def test_parts_are_published_once_by_the_worker_that_repeats_a_chord(add: Any, client: Client) -> None:

    parts = group([add.s(number, 1).set(task_id=f'part {number}') for number in range(4)])
    for _ in range(2):
        with idempotent('the chord'):
            parts.apply_async()
    assert len(items(client)) == 5
