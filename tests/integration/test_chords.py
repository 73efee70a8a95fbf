"""Chords: each part is counted once and the body is sent once, whatever fails. Broker and results share a database."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery, chord, states
from celery.app.task import Context
from celery.canvas import Signature
from celery.exceptions import ChordError, SoftTimeLimitExceeded
from kombu import Connection

from celery_couchdb.backend import CouchDBBackend
from celery_couchdb.results.documents import ChordPart
from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.write_result import WriteStatus
from kombu_couchdb.documents import workitem
from kombu_couchdb.errors import ServerUnavailable
from tests.conftest import PATIENCE, wait_for
from tests.support import Inbox, Request, items
from tests.support import end as end_app


class Site:
    """An app, with methods that act as its workers; each call of `backend()` is another worker."""

    def __init__(self, url: str, client: Client) -> None:
        self.url, self.client = url, client
        self._apps: list[Celery] = []
        self.app = self._app()

    def _app(self) -> Celery:
        app = Celery('test', set_as_current=False, broker=self.url, backend=self.url)
        # Backends with different options share nothing, like workers on different machines.
        app.conf.result_backend_transport_options = {'sweep_interval': 1.0 + len(self._apps)}

        @app.task(name='body', shared=False)
        def body(values: Any) -> Any:
            return values

        self._apps.append(app)
        return app

    def backend(self) -> CouchDBBackend:
        """Return the backend of another worker."""
        return self._app().backend

    def send(self, *values: Any, body: Signature | None = None) -> list[Context]:
        """Send a chord, consume the messages of its parts, and return their requests."""
        signature = chord([self.app.signature('part', (value,)) for value in values], app=self.app)
        self.result = signature(body or self.app.signature('body', task_id='the body'))
        return self.taken()

    def taken(self) -> list[Context]:
        """Receive and acknowledge all messages of the queue, as a worker does, and return their requests."""
        with Connection(self.url) as connection:
            inbox = Inbox(connection, 'celery')
            bodies = inbox.wait(len(items(self.client)))
            return [Context({**one.headers, **body[2]}) for one, body in zip(inbox.messages, bodies, strict=True)]

    def bodies(self) -> list[Any]:
        """Return the arguments of the bodies that are in the queue."""
        messages = [doc['message'] for doc in items(self.client)]
        return [json.loads(message['body'])[0] for message in messages if message['headers']['task'] == 'body']

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


def sweep(worker: CouchDBBackend, later: float = 60.0) -> None:
    """Look for expired results and unfinished chords, as a worker does after so many seconds."""
    now = worker.client.clock.now
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.client.clock, 'now', lambda: now() + later)
        worker.cleanup()


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


def test_duplicates_count_once_and_have_no_effect_later(site: Site) -> None:
    first, second = site.send('a', 'b')
    worker = site.backend()
    for part in (first, first, second, second, first):
        end(worker, part)
    end(site.backend(), second)
    assert site.bodies() == [[[0, 1]]]
    assert site.left() == []


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


def test_part_without_a_stored_result_is_retried_after_an_outage(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    [part] = site.send('a')
    part.ignore_result = True
    worker = site.backend()
    worker.always_retry = True
    put, failures = worker.client.put, iter([ServerUnavailable('no')] * 9)

    def away(doc: Document, **options: Any) -> str:
        for exc in failures:
            raise exc
        return put(doc, **options)

    object.__setattr__(worker.options, 'retry_policy', {'max_retries': 1, 'interval_start': 0})
    monkeypatch.setattr(worker.client, 'put', away)
    end(worker, part)
    assert site.bodies() == [[[0]]]


def test_last_parts_that_end_concurrently(site: Site) -> None:
    parts = site.send(*range(8))
    workers = [site.backend() for _ in parts]
    start = threading.Barrier(8)

    def run(worker: CouchDBBackend, part: Context) -> None:
        start.wait()
        end(worker, part)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, workers, parts))
    assert site.bodies() == [[list(range(8))]]
    assert site.left() == []


def test_large_chord_is_counted_rarely(
    site: Site, sent: list[Request], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    if client.is_cluster():
        pytest.skip('each node of a cluster numbers its own writes, so that each part is counted')
    monkeypatch.setattr('celery_couchdb.chords.counter._MAX_SMALL_CHORD', 3)
    parts = site.send(*range(40))
    workers = [site.backend() for _ in range(3)]
    sent.clear()
    for number, part in enumerate(parts):
        end(workers[number % 3], part)
    counts = [request for request in sent if request.method == 'GET' and request.path == '/_all_docs']
    assert len(counts) < 20
    assert site.bodies() == [[list(range(40))]]


def test_part_that_adds_another_part(site: Site) -> None:
    [part] = site.send('a')
    worker = site.backend()
    for _ in range(2):  # the first response may be lost
        worker.add_to_chord(part.group, worker.app.AsyncResult('added'))
    end(worker, part)
    assert site.bodies() == []
    end(worker, Context({'id': 'added', 'group': part.group, 'chord': part.chord, 'task': 'part'}), 'more')
    assert site.bodies() == [[[0, 'more']]]


def test_failed_part_fails_the_chord(site: Site) -> None:
    rescue = site.app.signature('rescue', queue='rescues')
    parts = site.send('a', 'b', 'c', body=site.app.signature('body', task_id='the body', link_error=[rescue]))
    site.backend().mark_as_failure(parts[1].id, KeyError('no'), request=parts[1])
    for part in (parts[0], parts[2]):
        end(site.backend(), part)
    assert [doc['message']['headers']['task'] for doc in items(site.client)] == ['rescue']
    with pytest.raises(ChordError, match=rf"Dependency {parts[1].id} raised KeyError\('no'\)"):
        site.app.AsyncResult('the body').get(timeout=PATIENCE)
    assert site.left() == ['Chord', 'Part', 'Part', 'Part'], 'an operator may retry the part, until they expire'
    sweep(site.backend(), later=60.0)
    assert len(items(site.client)) == 1, 'it fails once'


def test_failed_part_that_is_retried_completes_its_chord(site: Site) -> None:
    rescue = site.app.signature('rescue', queue='rescues')
    parts = site.send('a', 'b', body=site.app.signature('body', task_id='the body', link_error=[rescue]))
    for part in parts:
        site.backend().mark_as_failure(part.id, KeyError('no'), request=part)
    chords = site.backend().chords
    assert not chords.reopen('another', parts[0].id)
    assert chords.reopen(parts[0].group, parts[0].id)
    end(site.backend(), parts[0])
    assert [doc['message']['headers']['task'] for doc in items(site.client)] == ['rescue'] * 2, 'it fails once more'
    for _ in range(2):  # a process was killed, and an operator repeats it
        assert chords.reopen(parts[0].group, parts[1].id)
    sweep(site.backend(), later=60.0)
    end(site.backend(), parts[1])
    site.client.bulk([workitem.deleted(doc) for doc in items(site.client) if workitem.task_name(doc) == 'rescue'])
    assert site.bodies() == [[[0, 1]]]
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
    site.app.AsyncResult(parts[0].id).forget()
    assert site.app.AsyncResult(parts[0].id).state == states.PENDING
    end(site.backend(), parts[1], 'large' * 1000)
    assert site.bodies() == [[[value, 'large' * 1000]]]
    site.app.AsyncResult(parts[1].id).forget()
    assert site.left() == []


def test_result_that_was_deleted_by_hand(site: Site) -> None:
    parts = site.send('a', 'b')
    end(site.backend(), parts[0], 'large' * 1000)
    site.client.put(deletion(site.client.get(f'celery-task-meta-{parts[0].id}')))
    end(site.backend(), parts[1])
    with pytest.raises(ChordError, match=f'result of dependency {parts[0].id} was deleted'):
        site.app.AsyncResult('the body').get(timeout=PATIENCE)


def test_result_is_forgotten_before_its_part_is_stored(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large result and its part are stored in two requests."""
    parts, worker = site.send('a', 'b'), site.backend()
    write = worker.store.write

    def write_and_forget(doc: Document, part: ChordPart | None, *args: Any) -> None:
        write(doc)
        site.app.backend.forget(parts[0].id)
        if part:
            write(part)

    monkeypatch.setattr(worker.store, 'write', write_and_forget)
    end(worker, parts[0], 'large' * 1000)
    end(site.backend(), parts[1])
    assert site.bodies() == [[['large' * 1000, 1]]]


def test_result_is_forgotten_while_its_chord_is_completed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, worker = site.send('a', 'b'), site.backend()
    end(site.backend(), parts[0], 'large' * 1000)
    read = worker._read_results

    def forget_and_read(task_ids: list[str]) -> dict[str, Document | None]:
        site.app.backend.forget(parts[0].id)
        return read(task_ids)

    monkeypatch.setattr(worker, '_read_results', forget_and_read)
    end(worker, parts[1])
    assert site.bodies() == [[['large' * 1000, 1]]]


def test_part_visible_before_its_result(site: Site) -> None:
    """Part and result are in different shards, and there is a result of an earlier attempt."""
    parts = site.send('a', 'b')
    worker = site.backend()
    worker.store_result(parts[0].id, None, states.RETRY, request=parts[0])
    part = worker.chord_part(parts[0], parts[0].id, states.SUCCESS, 'large' * 1000)
    assert part is not None
    worker.chords.store_part(part)
    end(site.backend(), parts[1])
    assert worker.get_state('the body') == states.PENDING
    worker.store_result(parts[0].id, 'large' * 1000, states.SUCCESS, request=parts[0])
    sweep(site.backend())
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


@pytest.mark.parametrize(
    ('step', 'is_sent'),
    [('chords.claim', False), ('app.send_task', False), ('chords.finish', True), ('store.delete_all', True)],
)
def test_worker_killed_at_the_end_of_a_chord(
    site: Site, monkeypatch: pytest.MonkeyPatch, step: str, is_sent: bool
) -> None:
    parts = site.send('a', 'b')
    end(site.backend(), parts[0])
    worker = site.backend()
    owner, _, attribute = step.partition('.')
    monkeypatch.setattr(getattr(worker, owner), attribute, die)
    with pytest.raises(Killed):
        end(worker, parts[1])
    assert len(site.bodies()) == is_sent
    for _ in range(2):
        sweep(site.backend())
    assert site.bodies() == [[[0, 1]]]
    assert site.left() == []


@pytest.mark.parametrize('ended', [False, True], ids=['begun', 'ended'])
def test_slow_worker_leaves_the_structure_to_its_successor(
    site: Site, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    parts = nested(site, 'chord')
    for part in parts[:2]:
        end(site.backend(), part)
    slow, successor = site.backend(), site.backend()
    successor.chords._takeover_after = -60.0
    send, claimed = slow.app.send_task, list[Any]()

    def late(*args: Any, **options: Any) -> Any:
        claimed.append(successor.chords.claim('chord', ordered=True, unfinished=True))
        return send(*args, **options)

    monkeypatch.setattr(slow.app, 'send_task', late)
    end(slow, parts[2])
    if ended:
        site.app.backend.mark_as_done('body of chord', 'result')
    monkeypatch.setattr(successor.chords, 'claim', lambda *args, **options: claimed.pop())
    successor.complete_chord('chord', unfinished=True)
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
    first, second = site.taken()
    end(site.backend(), first)
    worker = site.backend()
    monkeypatch.setattr(worker.chords, 'finish', die)
    with pytest.raises(Killed):
        end(worker, second)
    inner_parts = site.taken()
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
    [part] = site.send('a')
    worker = site.backend()
    monkeypatch.setattr(worker.chords, 'claim', lambda *_, **__: None)
    end(worker, part)
    malformed = {'type': 'Chord', 'size': 1, 'added': [], 'claimed': 'x', 'sent': False, 'nested': False, 'date': 1.0}
    for name, body in (('0000', 'no JSON'), ('0001', {'body': 7}), ('0002', {'body': {'task': 'body'}})):
        client.put({'_id': f'chord-unlock-{name}', **malformed, 'body': {'value': body}})
        client.put(
            {'_id': f'chord-unlock-{name}:part:00000000:t', 'type': 'Part', 'request': {'value': {'request': 7}}}
        )
    sweep(site.backend())
    assert site.bodies() == [[[0]]]
    sweep(site.backend(), later=1000.0)
    lines = [line.split(',')[0] for line in caplog.messages if 'cannot be completed' in line]
    assert lines == [f'chord {name} cannot be completed' for name in ('0000', '0001', '0002')]


def test_chord_that_kills_its_processes_ends_without_its_errbacks(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    errback = site.app.signature('errback')
    [part] = site.send('a', body=site.app.signature('body', task_id='the body').on_error(errback))
    first, *others = (site.backend() for _ in range(3))
    for backend in (first, *others):
        monkeypatch.setattr(backend, 'chord_error_from_stack', die)
    with pytest.raises(Killed):
        first.mark_as_failure(part.id, ValueError('no'), request=part)
    for minutes, backend in enumerate(others, 1):
        with pytest.raises(Killed):
            sweep(backend, later=60.0 * minutes)
    assert site.app.backend.get_state('the body') == states.PENDING
    sweep(site.backend(), later=300.0)
    assert site.app.backend.get_state('the body') == states.FAILURE
    assert (items(site.client), site.left()) == ([], ['Chord', 'Part'])


def test_part_is_retried_while_its_chord_fails(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = site.send('a', 'b')
    worker, other = site.backend(), site.backend()
    fail = worker.chord_error_from_stack

    def meanwhile(*args: Any) -> Any:
        assert other.chords.reopen(str(second.group), str(second.id))
        return fail(*args)

    monkeypatch.setattr(worker, 'chord_error_from_stack', meanwhile)
    end(worker, first)
    worker.mark_as_failure(second.id, ValueError('no'), request=second)
    assert site.bodies() == []
    end(other, second)
    assert (site.bodies(), site.left()) == ([[[0, 1]]], [])


def test_errbacks_are_sent_once_although_their_process_was_killed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    errbacks = [site.app.signature('errback'), site.app.signature('other', task_id='given')]
    body = site.app.signature('body', task_id='the body')
    for errback in errbacks:
        body.on_error(errback)
    [part] = site.send('a', body=body)
    first = site.backend()
    monkeypatch.setattr(first, 'fail_from_current_stack', die)  # Celery calls it after the errbacks
    with pytest.raises(Killed):
        first.mark_as_failure(part.id, ValueError('no'), request=part)
    sent = [doc['_id'] for doc in items(site.client)]
    assert len(sent) == 2
    sweep(site.backend())
    assert [doc['_id'] for doc in items(site.client)] == sent
    assert (site.app.backend.get_state('the body'), site.left()) == (states.FAILURE, ['Chord', 'Part'])


def test_slow_end_of_a_chord_keeps_its_claim(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, worker = site.send('a'), site.backend()
    worker.chords._takeover_after = 0.3
    send, revisions = worker.app.send_task, list[str]()

    def slow(*args: Any, **options: Any) -> Any:
        revisions.append(site.client.get(doc_id)['_rev'])
        wait_for(lambda: site.client.get(doc_id)['_rev'] not in revisions, 'the claim to be written anew')
        return send(*args, **options)

    doc_id = f'chord-unlock-{parts[0].group}'
    monkeypatch.setattr(worker.app, 'send_task', slow)
    end(worker, parts[0])
    assert len(revisions) == 1
    assert site.bodies() == [[[0]]]
    assert site.left() == []


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
    worker = site.backend()
    monkeypatch.setattr(worker.chords, 'claim', lambda *_, **__: None)
    end(worker, parts[1])
    sweep(site.backend(), later=0.0)  # the worker may be about to claim the chord
    assert site.bodies() == []


def test_time_limit_strikes_when_the_body_was_sent(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    [part] = site.send('a')
    worker = site.backend()
    send = worker.app.send_task

    def struck(*args: Any, **options: Any) -> Any:
        send(*args, **options)
        raise SoftTimeLimitExceeded

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

    def header() -> Any:
        for number in range(3):
            yield app.signature('part', (number,))

    chord(header(), app=app)(app.signature('body'))
    for part in site.taken():
        end(site.backend(), part)
    assert site.bodies() == [[[0, 1, 2]]]
