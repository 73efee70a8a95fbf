"""Chords: each part is counted once and the body is sent once, whatever fails. Broker and results share a database."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from celery import Celery, chord, states
from celery.app.task import Context
from celery.canvas import Signature
from celery.exceptions import ChordError, SoftTimeLimitExceeded
from kombu import Connection

import celery_couchdb.design
from celery_couchdb.backend import CouchDBBackend, ResultTooLarge
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.write_result import WriteStatus
from kombu_couchdb.errors import DocumentTooLarge, ServerUnavailable
from tests.conftest import PATIENCE
from tests.support import Inbox, Request, items
from tests.support import end as end_app


class Site:
    """An app, with methods that act as its workers; each call of `backend()` is another worker."""

    def __init__(self, url: str, client: Client) -> None:
        self.url, self.client = url, client
        self._apps: list[Celery] = []
        self.app = self._app(1.0)
        self.patience = -60.0  # sweeps include chords that changed a moment ago
        self._workers = 1.0

    def _app(self, number: float, **conf: Any) -> Celery:
        app = Celery('test', set_as_current=False, broker=self.url, backend=self.url)
        # Backends with different options share nothing, like workers on different machines.
        app.conf.update(result_backend_transport_options={'sweep_interval': number}, **conf)

        @app.task(name='part', shared=False)
        def part(value: Any) -> Any:
            return value

        @app.task(name='body', shared=False)
        def body(values: Any) -> Any:
            return values

        self._apps.append(app)
        return app

    def backend(self, **conf: Any) -> CouchDBBackend:
        """Return the backend of another worker."""
        self._workers += 1.0
        backend = self._app(self._workers, **conf).backend
        backend.chords._takeover_after = self.patience
        return backend

    def send(self, *values: Any, body: Signature | None = None, **options: Any) -> list[Context]:
        """Send a chord, consume the messages of its parts, and return their requests."""
        signature = chord([self.app.signature('part', (value,)) for value in values], app=self.app)
        self.result = signature(body or self.app.signature('body', task_id='the body'), **options)
        return [Context({**message['headers'], **message['embed']}) for message in self.taken()]

    def taken(self) -> list[dict[str, Any]]:
        """Receive and acknowledge all messages of the queue, as a worker does."""
        found = []
        with Connection(self.url) as connection:
            inbox = Inbox(connection, 'celery', ack=True)
            for message, (args, _kwargs, embed) in zip(
                inbox.messages, inbox.wait(len(items(self.client))), strict=True
            ):
                found.append({'headers': message.headers, 'args': args, 'embed': embed})
        return found

    def bodies(self) -> list[Any]:
        """Return the arguments of the bodies that are in the queue."""
        return [self.args_of(doc) for doc in items(self.client) if doc['message']['headers']['task'] == 'body']

    def args_of(self, doc: Document) -> Any:
        return json.loads(doc['message']['body'])[0]

    def close(self) -> None:
        """Close all backends and the app."""
        for app in self._apps:
            end_app(app)

    def left(self) -> list[str]:
        """Return the types of the stored documents of chords."""
        rows = self.client.request('GET', '/_all_docs', {'include_docs': True})['rows']
        return sorted(row['doc']['type'] for row in rows if row['doc'].get('type') in ('Chord', 'Part', 'Group'))


@pytest.fixture
def site(url: str, client: Client) -> Iterator[Site]:
    site = Site(url, client)
    yield site
    site.close()


def end(worker: CouchDBBackend, part: Context, value: Any = None) -> None:
    """Store the success of a part, as a worker does."""
    worker.mark_as_done(part.id, part.group_index if value is None else value, part)


def sweep(worker: CouchDBBackend) -> None:
    worker.store.database.set_up()
    worker.complete_unfinished_chords(
        [row['id'] for row in worker.client.id_range('chord-unlock-', docs=True) if row['doc']['type'] == 'Chord']
    )


@pytest.mark.parametrize('ordered', [True, False])
def test_order_of_the_results(site: Site, ordered: bool) -> None:
    parts = site.send('a', 'b', 'c')
    for part in reversed(parts):
        assert site.bodies() == []
        worker = site.backend()
        object.__setattr__(worker.options, 'result_chord_ordered', ordered)
        end(worker, part)
    assert site.bodies() == [[[0, 1, 2] if ordered else [2, 1, 0]]]
    assert site.left() == []


@pytest.mark.parametrize('same_worker', [False, True], ids=['other workers', 'a worker that has it cached'])
def test_duplicates_count_once_and_have_no_effect_later(site: Site, same_worker: bool) -> None:
    first, second = site.send('a', 'b')
    worker = site.backend()
    for part in (first, first, second, second, first):
        end(worker if same_worker or part is first else site.backend(), part)
    assert site.bodies() == [[[0, 1]]]
    assert site.left() == []


@pytest.mark.parametrize('size', [2, 120], ids=['few', 'many'])
def test_outage_while_the_last_part_is_counted(site: Site, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    parts = site.send(*range(size))
    first, last = site.backend(), site.backend()
    for part in parts[:-1]:
        end(first, part)
    for name in ('id_range', 'sequence'):
        real, failures = getattr(last.client, name), iter([ServerUnavailable('no')])

        def fails_first(*args: Any, real: Any = real, failures: Any = failures, **kwargs: Any) -> Any:
            for exc in failures:
                raise exc
            return real(*args, **kwargs)

        monkeypatch.setattr(last.client, name, fails_first)
    end(last, parts[-1])
    assert site.bodies() == [[list(range(size))]]


def test_part_that_cannot_be_counted_does_not_fail(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = site.send('a', 'b')
    worker, last = site.backend(), site.backend()
    end(worker, parts[0])
    object.__setattr__(last.options, 'retry_policy', {'max_retries': 1, 'interval_start': 0})

    def away(*args: Any, **kwargs: Any) -> Any:
        raise ServerUnavailable('no')

    monkeypatch.setattr(last.client, 'id_range', away)
    end(last, parts[1])
    assert worker.get_state(parts[1].id) == states.SUCCESS
    assert site.bodies() == []
    sweep(worker)
    assert site.bodies() == [[[0, 1]]]


@pytest.mark.parametrize('count', [2, 24])
def test_last_parts_that_end_concurrently(site: Site, count: int) -> None:
    parts = site.send(*range(count))
    workers = [site.backend() for _ in parts]
    start, failed = threading.Barrier(count), list[Any]()

    def run(worker: CouchDBBackend, part: Context) -> None:
        start.wait()
        try:
            end(worker, part)
        except Exception as exc:
            failed.append(exc)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(workers, parts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert site.bodies() == [[list(range(count))]]
    assert site.left() == []


def test_chord_of_many_parts_is_counted_rarely(site: Site, sent: list[Request], client: Client) -> None:
    if client.is_cluster():
        pytest.skip('each node of a cluster numbers its own writes, so that each part is counted')
    parts = site.send(*range(150))
    workers = [site.backend() for _ in range(3)]
    sent.clear()
    for number, part in enumerate(parts):
        assert site.bodies() == [] if number % 30 == 0 else True
        end(workers[number % 3], part)
    counts = [request for request in sent if request.method == 'GET' and request.path == '/_all_docs']
    assert len(counts) < 60
    assert site.bodies() == [[list(range(150))]]


def test_part_that_adds_another_part(site: Site) -> None:
    [part] = site.send('a')
    worker = site.backend()
    for _ in range(2):  # the first response may be lost
        worker.add_to_chord(part.group, worker.app.AsyncResult('added'))
    end(worker, part)
    assert site.bodies() == []
    end(worker, Context({'id': 'added', 'group': part.group, 'chord': part.chord, 'task': 'part'}), 'more')
    assert site.bodies() == [[[0, 'more']]]


def test_parts_without_stored_results(site: Site) -> None:
    parts = site.send('a', 'b')
    for part in parts:
        part.ignore_result = True
        end(site.backend(), part, {'of': part.group_index})
    assert site.bodies() == [[[{'of': 0}, {'of': 1}]]]
    assert site.client.fetch([f'celery-task-meta-{part.id}' for part in parts]) == [None, None]


def test_part_too_large_to_be_counted_fails_the_chord(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = site.send('a', 'b')
    end(site.backend(), parts[1])
    worker = site.backend()
    put = worker.client.put

    def refuse_large(doc: Document, **options: Any) -> str:
        if len(json.dumps(doc)) > 5000:
            raise DocumentTooLarge('no')
        return put(doc, **options)

    monkeypatch.setattr(worker.client, 'put', refuse_large)
    parts[0].ignore_result = True
    with pytest.raises(ResultTooLarge, match=f'part:00000000:{parts[0].id} cannot be stored') as raised:
        end(worker, parts[0], 'large' * 1000)
    worker.mark_as_failure(parts[0].id, raised.value, request=parts[0], store_result=False)  # as Celery does
    with pytest.raises(ChordError, match='cannot be stored'):
        site.app.AsyncResult('the body').get(timeout=10)
    assert site.left() == []


@pytest.mark.parametrize('always', [False, True])
def test_part_without_a_stored_result_is_retried_after_an_outage(
    site: Site, monkeypatch: pytest.MonkeyPatch, always: bool
) -> None:
    [part] = site.send('a')
    part.ignore_result = True
    worker = site.backend(result_backend_always_retry=always)
    object.__setattr__(worker.options, 'retry_policy', {'max_retries': 1, 'interval_start': 0})
    put, failures = worker.client.put, iter([ServerUnavailable('no')] * 3)

    def away(doc: Document, **options: Any) -> str:
        for exc in failures:
            raise exc
        return put(doc, **options)

    monkeypatch.setattr(worker.client, 'put', away)
    with nullcontext() if always else pytest.raises(ServerUnavailable):
        end(worker, part)
    assert site.bodies() == ([[[0]]] if always else [])


def test_failed_part_fails_the_chord(site: Site) -> None:
    rescue = site.app.signature('rescue', queue='rescues')
    parts = site.send('a', 'b', 'c', body=site.app.signature('body', task_id='the body', link_error=[rescue]))
    site.backend().mark_as_failure(parts[1].id, KeyError('no'), request=parts[1])
    for part in (parts[0], parts[2]):
        end(site.backend(), part)
    assert [doc['message']['headers']['task'] for doc in items(site.client)] == ['rescue']
    with pytest.raises(ChordError, match=rf"Dependency {parts[1].id} raised KeyError\('no'\)"):
        site.app.AsyncResult('the body').get(timeout=PATIENCE)
    assert site.left() == []


def test_error_of_the_part_is_raised_where_it_is_known(site: Site) -> None:
    parts = site.send('a', 'b')
    waiting = threading.Timer(
        0.3, lambda: [site.backend().mark_as_failure(part.id, KeyError('no'), request=part) for part in parts]
    )
    waiting.start()
    with pytest.raises(KeyError):
        site.result.get(timeout=PATIENCE, interval=PATIENCE)
    waiting.join()


@pytest.mark.parametrize('value', ['small', 'large' * 1000], ids=['in the part', 'not in the part'])
def test_result_that_was_deleted(site: Site, value: str) -> None:
    parts = site.send('a', 'b')
    end(site.backend(), parts[0], value)
    site.app.backend.forget(parts[0].id)
    end(site.backend(), parts[1], 'large' * 1000)
    if value == 'small':
        assert site.bodies() == [[['small', 'large' * 1000]]]
    else:
        with pytest.raises(ChordError, match=f'result of dependency {parts[0].id} was deleted'):
            site.app.AsyncResult('the body').get(timeout=PATIENCE)


@pytest.mark.parametrize('earlier', [None, states.RETRY])
def test_part_visible_before_its_result(site: Site, earlier: str | None) -> None:
    """Part and result are in different shards, or the result conflicts with the one of an earlier attempt."""
    parts = site.send('a', 'b')
    worker = site.backend()
    if earlier:
        worker.store_result(parts[0].id, None, earlier, request=parts[0])
    part = worker.chord_part(parts[0], parts[0].id, states.SUCCESS, 'large' * 1000)
    assert part is not None
    worker.chords.store_part(part)
    end(site.backend(), parts[1])
    assert worker.get_state('the body') == states.PENDING
    worker.store_result(parts[0].id, 'large' * 1000, states.SUCCESS, request=parts[0])
    sweep(site.backend())
    assert site.bodies() == [[['large' * 1000, 1]]]


def test_result_visible_shortly_after_its_part(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = site.send('a', 'b')
    end(site.backend(), parts[0], 'large' * 1000)
    last = site.backend()
    find, known, asked = last.client.find, last.client.known, list[Any]()

    def behind(ids: Any) -> Any:
        if ids[0].startswith('chord-unlock-'):
            return find(ids)
        asked.append(ids)
        return find(ids) if len(asked) > 1 else [None for _ in ids]

    monkeypatch.setattr(last.client, 'find', behind)
    monkeypatch.setattr(last.client, 'known', lambda ids: known(ids) if len(asked) > 1 else set())
    end(last, parts[1])
    assert site.bodies() == [[['large' * 1000, 1]]]


def nested(site: Site, name: str) -> list[Context]:
    """Send a chord with a group in a group in its header, and return the requests of its three parts."""
    app, body = site.app, site.app.signature('body', task_id=f'body of {name}')
    ids = [f'{name} {index}' for index in range(3)]
    inner = app.GroupResult(f'{name} inner', [app.AsyncResult(ids[1])])
    group = app.GroupResult(f'{name} group', [app.AsyncResult(ids[0]), inner])
    app.backend.apply_chord((name, [group, app.AsyncResult(ids[2])]), body)
    app.backend.set_chord_size(name, 3)
    return [
        Context({'id': task_id, 'group': name, 'group_index': index, 'chord': body, 'task': 'part'})
        for index, task_id in enumerate(ids)
    ]


@pytest.mark.parametrize('ignored', [False, True], ids=['stored results', 'no results'])
def test_groups_in_the_header_keep_their_structure(site: Site, ignored: bool) -> None:
    for part in nested(site, 'chord'):
        part.ignore_result = ignored
        end(site.backend(), part)
    assert site.bodies() == [[[[0, [1]], 2]]]
    assert site.left() == []


def test_part_of_a_group_in_the_header_that_was_not_counted(site: Site) -> None:
    """Celery 5.4 counts a group at the end of a chain as one part."""
    parts = nested(site, 'chord')
    site.app.backend.set_chord_size('chord', 2)
    end(site.backend(), parts[0])
    site.backend().store_result(parts[1].id, 1, states.SUCCESS)
    end(site.backend(), parts[2])
    assert site.bodies() == [[[[0, [1]], 2]]]


def test_chord_that_is_sent_again_counts_from_zero(site: Site) -> None:
    parts = site.send('a', 'b')
    end(site.backend(), parts[0])  # the first run was not finished
    site.app.backend.apply_chord((parts[0].group, []), site.app.signature('body', task_id='the body'))
    site.app.backend.set_chord_size(parts[0].group, 2)
    end(site.backend(), parts[1])
    assert site.bodies() == []
    end(site.backend(), parts[0])
    assert site.bodies() == [[[0, 1]]]


# -- killed workers, and sweeps by others


class Killed(BaseException):
    """An exception that ends a worker at a certain point, like SIGKILL."""


def die(*_: Any, **__: Any) -> Any:
    raise Killed


@pytest.mark.parametrize('again', [1, 3])
@pytest.mark.parametrize(
    'point',
    [
        'before it counts',
        'before it claims',
        'before it joins',
        'before it sends',
        'after it has sent',
        'while it deletes',
    ],
)
def test_worker_killed_at_the_end_of_a_chord(
    site: Site, monkeypatch: pytest.MonkeyPatch, point: str, again: int
) -> None:
    parts = site.send('a', 'b')
    end(site.backend(), parts[0])
    worker = site.backend()
    name = {
        'before it counts': 'chords.claim',
        'before it claims': 'chords._claim',
        'before it joins': '_join',
        'before it sends': 'app.send_task',
        'after it has sent': 'chords.finish',
        'while it deletes': 'store.delete_all',
    }[point]
    owner: Any = worker
    *path, attribute = name.split('.')
    for step in path:
        owner = getattr(owner, step)
    monkeypatch.setattr(owner, attribute, die)
    with pytest.raises(Killed):
        end(worker, parts[1])
    assert len(site.bodies()) == (1 if point in ('after it has sent', 'while it deletes') else 0)
    for _ in range(again):
        sweep(site.backend())
    assert site.bodies() == [[[0, 1]]]
    assert site.left() == []


def test_worker_killed_between_two_deletions(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = site.send(*range(4))
    monkeypatch.setattr('celery_couchdb.results.result_store._DELETE_DOCS', 2)
    worker = site.backend()
    bulk = worker.client.bulk

    def delete_once(docs: Any, **options: Any) -> Any:
        if docs[0].get('_deleted'):
            monkeypatch.setattr(
                worker.client, 'bulk', lambda docs, **_: die() if docs[0].get('_deleted') else bulk(docs)
            )
        return bulk(docs, **options)

    monkeypatch.setattr(worker.client, 'bulk', delete_once)
    for part in parts[:3]:
        end(worker, part)
    with pytest.raises(Killed):
        end(worker, parts[3])
    assert site.left() == ['Chord', 'Part', 'Part']
    sweep(site.backend())
    assert site.bodies() == [[[0, 1, 2, 3]]]
    assert site.left() == []


def test_nested_chord_is_completed_after_its_worker_was_killed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    *parts, last = nested(site, 'chord')
    for part in parts:
        end(site.backend(), part)
    worker = site.backend()
    monkeypatch.setattr(worker.app, 'send_task', die)
    with pytest.raises(Killed):
        end(worker, last)
    sweep(site.backend())
    assert site.bodies() == [[[[0, [1]], 2]]]
    assert site.left() == []


@pytest.mark.parametrize('ended', [False, True], ids=['begun', 'ended'])
def test_slow_worker_leaves_the_structure_to_its_successor(
    site: Site, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    parts = nested(site, 'chord')
    for part in parts[:2]:
        end(site.backend(), part)
    slow, successor = site.backend(), site.backend()
    send, claimed = slow.app.send_task, list[Any]()

    def late(*args: Any, **options: Any) -> Any:
        claimed.extend(successor.chords.claim_unfinished(['chord-unlock-chord']))
        return send(*args, **options)

    monkeypatch.setattr(slow.app, 'send_task', late)
    end(slow, parts[2])
    if ended:
        site.app.backend.mark_as_done('body of chord', 'result')
    monkeypatch.setattr(successor.chords, 'claim_unfinished', lambda ids: claimed)
    successor.complete_unfinished_chords([])
    assert site.bodies() == [[[[0, [1]], 2]]]
    assert site.app.backend.get_state('body of chord') == (states.SUCCESS if ended else states.PENDING)
    assert site.left() == []


def test_slow_worker_does_not_fail_a_chord_that_its_successor_completed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = nested(site, 'chord')
    for part in parts[:2]:
        end(site.backend(), part)
    slow = site.backend()
    restore = slow.restore_group

    def late(*args: Any, **options: Any) -> Any:
        sweep(site.backend())
        return restore(*args, **options)

    monkeypatch.setattr(slow, 'restore_group', late)
    end(slow, parts[2])
    assert site.bodies() == [[[[0, [1]], 2]]]
    assert site.app.backend.get_state('body of chord') == states.PENDING
    assert site.left() == []


def test_body_that_is_a_chord_is_sent_after_its_worker_was_killed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    task = site.app.signature
    inner = chord([task('part', (i,), immutable=True) for i in range(2)], task('body'), app=site.app)
    outer = chord([task('part', ('a',)), task('part', ('b',))], inner, app=site.app)
    outer()
    first, second = (Context({**message['headers'], **message['embed']}) for message in site.taken())
    end(site.backend(), first)
    worker = site.backend()
    monkeypatch.setattr(worker.chords, 'finish', die)
    with pytest.raises(Killed):
        end(worker, second)
    inner_parts = [Context({**message['headers'], **message['embed']}) for message in site.taken()]
    assert [part.task for part in inner_parts] == ['part', 'part']
    end(site.backend(), inner_parts[0])
    sweep(site.backend())
    assert items(site.client) == []  # no message is sent again
    end(site.backend(), inner_parts[1])
    assert len(site.bodies()) == 1
    assert site.left() == []


def test_malformed_chord_does_not_stop_the_sweep(
    site: Site, client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = site.send('a')
    worker = site.backend()
    worker.chords.claim = lambda *_: None  # type: ignore[method-assign]
    end(worker, parts[0])
    malformed = {'type': 'Chord', 'size': 1, 'added': [], 'claimed': 'x', 'sent': False, 'nested': False, 'date': 1.0}
    client.put({'_id': 'chord-unlock-0000', **malformed, 'body': {'value': 'no JSON'}})
    client.put({'_id': 'chord-unlock-0001', **malformed, 'body': {'value': {'body': 7}}})
    sweep(site.backend())
    assert site.bodies() == [[[0]]]
    later = site.backend()
    monkeypatch.setattr(later.client.clock, 'now', lambda: time.time() + 1000)
    unfinished = later.client.view(celery_couchdb.design.NAME, 'due')
    sweep(later)
    lines = [record for record in caplog.records if 'cannot be completed' in record.message]
    assert [record.message[:60] for record in lines] == [
        f'chord {name} cannot be completed, and is left until it expires'[:60] for name in ('0000', '0001')
    ]
    assert not any(record.exc_info for record in lines)
    assert not [row for row in unfinished if row['value'][0] == 'Unfinished']


@pytest.mark.parametrize('ended', [False, True], ids=['begun', 'ended'])
def test_consumed_body_is_not_sent_again(site: Site, monkeypatch: pytest.MonkeyPatch, ended: bool) -> None:
    parts = site.send('a')
    worker = site.backend()
    monkeypatch.setattr(worker.chords, 'finish', die)
    with pytest.raises(Killed):
        end(worker, parts[0])
    assert len(site.taken()) == 1
    if ended:
        site.app.backend.mark_as_done('the body', 'result')
    sweep(site.backend())
    assert site.bodies() == []
    assert site.left() == []


def test_sweep_ignores_chords_in_progress(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = site.send('a', 'b')
    end(site.backend(), parts[0])
    sweep(site.backend())
    assert site.bodies() == []
    site.patience = 30.0
    worker = site.backend()
    monkeypatch.setattr(worker.chords, 'claim', lambda *_: None)
    end(worker, parts[1])
    sweep(site.backend())  # the worker may be about to claim the chord
    assert site.bodies() == []


@pytest.mark.parametrize('is_sent', [False, True], ids=['broker outage', 'soft time limit after sending'])
def test_error_while_the_body_is_sent(site: Site, monkeypatch: pytest.MonkeyPatch, is_sent: bool) -> None:
    [part] = site.send('a')
    worker = site.backend()
    send = worker.app.send_task

    def struck(*args: Any, **options: Any) -> Any:
        if is_sent:
            send(*args, **options)
            raise SoftTimeLimitExceeded
        raise ServerUnavailable('no')

    monkeypatch.setattr(worker.app, 'send_task', struck)
    end(worker, part)
    assert worker.get_state('the body') == states.PENDING
    sweep(site.backend())
    assert site.bodies() == [[[0]]]
    assert worker.get_state('the body') == states.PENDING
    assert site.left() == []


def test_unproven_claim_of_a_chord(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    [part] = site.send('a')
    worker = site.backend()
    bulk = worker.client.bulk
    monkeypatch.setattr(
        worker.client,
        'bulk',
        lambda docs, **options: [answer._replace(status=WriteStatus.UNPROVEN) for answer in bulk(docs, **options)],
    )
    end(worker, part)
    assert site.bodies() == []
    sweep(site.backend())
    assert site.bodies() == [[[0]]]


def test_last_part_that_a_lagging_node_does_not_show(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    [part] = site.send('a')
    worker = site.backend()
    monkeypatch.setattr(worker.client, 'is_cluster', lambda: True)
    id_range, asked = worker.client.id_range, list[str]()

    def behind(prefix: str, **options: Any) -> Any:
        asked.append(prefix)
        return id_range(prefix, **options) if len(asked) > 1 else []

    monkeypatch.setattr(worker.client, 'id_range', behind)
    end(worker, part)
    assert site.bodies() == [[[0]]]


def test_body_that_cannot_be_encoded(site: Site) -> None:
    [part] = site.send('a', body=site.app.signature('body', task_id='the body'))
    worker = site.backend()
    worker.app.tasks['body'].serializer = 'no such thing'
    end(worker, part)
    with pytest.raises(ChordError, match='Callback error'):
        site.app.AsyncResult('the body').get(timeout=PATIENCE)
    assert site.left() == []


def test_parts_end_while_the_header_is_still_sent(site: Site) -> None:
    """If the header is a generator, the first parts end before the size of the chord is known."""
    app = site.app
    ended: list[str] = []

    def header() -> Any:
        for number in range(3):
            yield app.signature('part', (number,))

    chord(header(), app=app)(app.signature('body'))
    for message in site.taken():
        part = Context({**message['headers'], **message['embed']})
        end(site.backend(), part)
        ended.append(part.id)
    assert len(ended) == 3
    assert site.bodies() == [[[0, 1, 2]]]
