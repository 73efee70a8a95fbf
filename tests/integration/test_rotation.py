"""The rotation: databases move to new ones while workers and publishers follow; nothing is lost or repeated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from celery import Celery
from click.testing import Result
from kombu import Connection

from celery_couchdb.testing import Server
from examples.managed.service import PLANS, Service
from kombu_couchdb.admin import dead, rotation
from kombu_couchdb.admin.rotation import Report, rotate
from kombu_couchdb.admin.vacuum import Progress
from kombu_couchdb.couchdb.changes import read
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.location import DOCUMENT
from kombu_couchdb.couchdb.pacing import Kind
from kombu_couchdb.documents import workitem
from kombu_couchdb.errors import AccessDenied, DatabaseMissing, DatabaseMoved
from kombu_couchdb.queues.databases import ensure
from tests.conftest import PATIENCE, wait_for
from tests.support import Inbox, Peer, command_of, eta, items, leave_leaf, publish


@pytest.fixture
def couch(client: Client, apache_couchdb: bool) -> Iterator[Client]:
    """The test's database, set up, on Apache CouchDB. All databases with its name before a dash are deleted at last."""
    if not apache_couchdb:
        pytest.skip('the embedded server does not enforce validate_doc_update, which closes a database')
    ensure(client, True)
    yield client
    name, server = client.address.database, Client(client.address.root)
    for found in server.request('GET', '/_all_dbs', {'startkey': f'"{name}-"', 'endkey': f'"{name}."'}):
        server.request('DELETE', f'/{found}')


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which nothing else writes: do not wait for what others may have written."""
    monkeypatch.setattr(rotation, '_SETTLE_SECONDS', 0.0)
    monkeypatch.setattr(rotation, '_LINGER_SECONDS', 0.0)


def quiet(step: str, done: int, total: int) -> None:
    """Show no progress."""


def move(client: Client, progress: Progress = quiet, age: float = 0.0) -> Report:
    return rotate(client, progress, age=age)


def former(client: Client) -> Client:
    """Return a client for the database as it was before it was moved."""
    return client.beside(client.address.database, moves=False)


def leaves(client: Client) -> dict[str, Any]:
    """Return all leaf revisions of a database by id, without what belongs to one database only."""
    ids = [row['id'] for row in client.request('GET', '/_changes')['results']]
    kept = [doc_id for doc_id in ids if doc_id not in ('_design/celery-marks', '_design/celery-closed')]
    kept = [doc_id for doc_id in kept if not doc_id.startswith('celery-probe:')]
    found = zip(kept, client.fetch_leaves(kept, revs=True, attachments=True), strict=True)
    return {doc_id: sorted(docs, key=lambda doc: doc['_rev']) for doc_id, docs in found}


# -- what moves


def test_everything_moves_with_its_revisions(couch: Client, quick: None, connect: Callable[..., Connection]) -> None:
    connection = connect()
    publish(connection, 'now')
    publish(connection, 'later', headers=eta(3600))
    publish(connection, 'x' * 200_000)
    inbox = Inbox(connection, 'other', ack=False)
    publish(connection, 'rejected', to='other')
    inbox.wait(1)
    inbox.messages[0].reject()
    wait_for(lambda: dead.count(couch), 'the dead letter')
    doc = items(couch)[0]
    leave_leaf(couch, doc['_id'], '3-b', **{**doc, 'priority': 3})
    couch.put({'_id': '_design/shop', 'views': {'all': {'map': 'function (doc) { emit(doc._id); }'}}})
    connection.release()
    before, security = leaves(couch), couch.request('GET', '/_security')
    report = move(couch)
    assert (report.former, report.present) == (couch.address.database, f'{couch.address.database}-r1')
    after = leaves(couch)
    assert after.keys() <= before.keys()
    assert {doc_id: docs for doc_id, docs in before.items() if not all(doc.get('_deleted') for doc in docs)} == {
        doc_id: docs for doc_id, docs in after.items() if not all(doc.get('_deleted') for doc in docs)
    }
    assert couch.request('GET', '/_security') == security
    assert couch.request('GET', '/_revs_limit') == 20
    assert couch.info()['db_name'] == couch.present == f'{couch.address.database}-r1'
    with pytest.raises(DatabaseMissing):
        former(couch).info()
    assert sorted(Inbox(connect(), 'q').wait(2)) == ['now', 'x' * 200_000]


def test_a_service_with_limits_that_does_not_offer_a_purge(couch: Client, server: Server, quick: None) -> None:
    with (
        Service(server.url, PLANS['lite']) as service,
        Connection(Server(service.url).couchdb_url(couch.address.database)) as c,
    ):
        with c.Producer() as producer, producer.batch():
            for number in range(30):
                producer.publish(number, routing_key='q')
        report = move(c.transport.couchdb)
        # Probes and the last documents may not use up the writes of seconds: a database is closed for 20 s at the most.
        assert report.copied >= 30
        assert service.counts.units[Kind.WRITE] < 30 + 30 + 60
        assert sorted(Inbox(c, 'q').wait(30)) == list(range(30))
    assert couch.info()['db_name'] == report.present == f'{couch.address.database}-r1'


def test_old_tombstones_stay_behind_and_young_ones_move(couch: Client, quick: None) -> None:
    old, young = (workitem.new_id(time.time()) for _ in range(2))
    foreign = 'invoice-5'
    delete_documents(couch, old, foreign)
    moves: list[str] = []

    def delete(step: str, done: int, total: int) -> None:
        if step == 'copy' and not moves:  # after the mark
            moves.append(step)
            delete_documents(couch, young)

    assert move(couch, delete).tombstones_after == 2
    assert {row['id'] for row in couch.request('GET', '/_changes')['results'] if row.get('deleted')} == {young, foreign}


def delete_documents(client: Client, *ids: str) -> None:
    for doc_id in ids:
        client.put({'_id': doc_id, '_rev': client.put({'_id': doc_id}), '_deleted': True})


# -- who follows


def test_claim_that_is_held_meanwhile_is_acknowledged_once(couch: Client, connect: Callable[..., Connection]) -> None:
    connection = connect()
    publish(connection, 'a')
    inbox = Inbox(connection, 'q', ack=False)
    inbox.wait(1)
    move(couch)
    inbox.messages[0].ack()
    wait_for(lambda: not items(couch), 'the acknowledgement')
    publish(connection, 'b')
    assert inbox.wait(2) == ['a', 'b']


def test_consumer_in_another_process_follows(couch: Client, url: str, connect: Callable[..., Connection]) -> None:
    with Peer(url, ack=True) as peer:
        publish(connect(), 1)
        assert peer.next()['got'] == 1
        move(couch)
        publish(connect(), 2)
        assert peer.next()['got'] == 2
        move(couch)
        publish(connect(), 3)
        assert peer.next()['got'] == 3
    assert not [line for line in peer.log if 'ERROR' in line or 'Traceback' in line], peer.log


def test_publishers_and_consumers_meet_no_error(couch: Client, connect: Callable[..., Connection]) -> None:
    sent, stop = list[int](), threading.Event()

    def send() -> None:
        connection = connect()
        while not stop.is_set():
            publish(connection, len(sent))
            sent.append(len(sent))

    def moving() -> None:
        for number in (1, 2):
            assert move(couch).present.endswith(f'-r{number}')

    publisher, mover = threading.Thread(target=send), threading.Thread(target=moving)
    inbox = Inbox(connect(), 'q', prefetch=5)
    publisher.start()
    mover.start()
    inbox.drain_until(lambda: not mover.is_alive())
    more = len(sent) + 10
    inbox.drain_until(lambda: len(sent) >= more or not publisher.is_alive())
    assert publisher.is_alive(), 'the publisher has failed'
    stop.set()
    publisher.join()
    assert sorted(inbox.wait(len(sent))) == sent
    inbox.stays(len(sent), 1.0)
    assert not items(couch)


def test_program_that_waits_for_a_result_gets_it(app: Celery, couch: Client) -> None:
    app.backend.store_result('early', 1, 'SUCCESS')
    found = list[Any]()
    thread = threading.Thread(target=lambda: found.append(app.AsyncResult('late').get(timeout=PATIENCE)))
    thread.start()
    move(app.backend.client)
    assert app.AsyncResult('early').get(timeout=PATIENCE) == 1
    app.backend.store_result('late', 2, 'SUCCESS')
    thread.join()
    assert found == [2]


def test_feed_of_the_former_database_is_not_continued(couch: Client, quick: None) -> None:
    couch.put({'_id': 'a'})
    since = couch.sequence()
    move(couch)
    with pytest.raises(DatabaseMoved):
        read(couch, since, {}, 10)
    assert read(couch, couch.sequence(), {}, 10)['results'] == []


def test_database_that_was_moved_is_not_created_again(couch: Client, server: Server, quick: None) -> None:
    move(couch)
    fresh = forgetful(couch)
    fresh.create()
    assert fresh.present == f'{couch.address.database}-r1'
    with pytest.raises(DatabaseMissing):
        former(couch).info()


def forgetful(client: Client) -> Client:
    """Return a client that does not know where its database is, as in a new process."""
    fresh = client.beside(client.address.database)
    fresh.http.location = type(fresh.http.location)(client.address.database)
    return fresh


# -- a rotation that is stopped


class Killed(BaseException):
    """The process of a rotation ends."""


class Mortal(Client):
    """A client of a process that is killed before one of its requests."""

    left = 0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        send = self.http._send

        def counted(*args: Any, **settings: Any) -> Any:
            Mortal.left -= 1
            if Mortal.left < 0:
                raise Killed
            return send(*args, **settings)

        self.http._send = counted  # type: ignore[method-assign]


def test_killed_rotation_loses_nothing_and_is_finished(
    couch: Client, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, '_CLOSED_SECONDS', 4.0)
    monkeypatch.setattr(rotation, '_CLOCK_SECONDS', 2.0)
    counted, left = couch.put({'_id': 'counted', 'number': 0}), 0
    while True:
        gone = couch.put({'_id': f'gone-{left}'})
        Mortal.left = left
        try:
            move(Mortal(couch.address))
            break
        except Killed:
            pass
        couch = forgetful(couch)
        now = couch.get('counted')
        assert now['_rev'] == counted
        with suppress(DatabaseMoved):  # it is closed for ever: only the next rotation opens it
            couch.bulk([{'_id': f'gone-{left}', '_rev': gone, '_deleted': True}], only=couch.present)
            gone = ''
        move(couch)
        assert bool(couch.get_or_none(f'gone-{left}')) == bool(gone)
        counted = couch.put({**now, 'number': now['number'] + 1})
        left += 3
    assert couch.get('counted')['number'] > 10


def test_long_closing_ends_no_lease(
    couch: Client, connect: Callable[..., Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can write a heartbeat in a closed database, and those who only read do not take that for silence."""
    monkeypatch.setattr(rotation, '_SETTLE_SECONDS', 8.0)
    lease = {'visibility_timeout': 2.0}
    inbox = Inbox(connect(**lease), 'q', ack=False)
    publish(connect(), 1)
    inbox.wait(1)
    other = Inbox(connect(**lease), 'q')
    mover = threading.Thread(target=move, args=[couch])
    mover.start()
    other.drain_until(lambda: not mover.is_alive())
    other.drain(3.0)
    inbox.messages[0].ack()
    wait_for(lambda: not items(couch), 'the acknowledgement')
    assert (len(inbox.messages), len(other.messages)) == (1, 0)


# -- rights, and the command


def test_members_follow_and_cannot_say_where_the_database_is(
    couch: Client, server: Server, member: dict[str, str], quick: None
) -> None:
    couch.request('PUT', '/_security', body={'members': {'names': [member['user']]}})
    user = server.client(couch.address.database, **member)
    rev = user.put({'_id': 'a'})
    move(couch)
    user = forgetful(user)
    user.put({'_id': 'a', '_rev': rev})
    location = user.beside(f'{couch.address.database}-location', moves=False)
    with pytest.raises(AccessDenied):
        location.put({**location.get(DOCUMENT), 'database': f'{couch.address.database}-r7'})


def test_rotation_needs_a_user_who_may_create_databases(couch: Client, server: Server, member: dict[str, str]) -> None:
    names = {'names': [member['user']]}
    couch.request('PUT', '/_security', body={'admins': names, 'members': names})
    with pytest.raises(AccessDenied, match=rf"user '{member['user']}' may not create databases"):
        move(server.client(couch.address.database, **member))
    couch.put({'_id': 'a'})


def command_for(url: str, results: str) -> Callable[..., Result]:
    app = Celery('rotated', set_as_current=False, broker=url, backend=results)
    app.conf.broker_transport_options = {'visibility_timeout': 0.5}
    return command_of(app)


def test_command_moves_all_databases_and_says_where_they_are(couch: Client, server: Server, url: str) -> None:
    name = couch.address.database
    run = command_for(url, server.couchdb_url(f'{name}-results'))
    run('setup')
    delete_documents(couch, workitem.new_id(time.time()))
    done = run('vacuum', '--rotate', '--age', '0.6', '--yes')
    assert done.exit_code == 0, done.output
    assert f'{name}: its documents are in the database {name}-r1 now, and the former one, {name}, is deleted' in (
        done.stdout
    )
    assert '1 → 0 ' in done.stdout
    assert f'{name}-results: its documents are in the database {name}-results-r1 now' in done.stdout
    assert f'{name} (in {name}-r1)' in run('status').stdout
    assert run('check').exit_code == 0
    done = run('setup', '--member', 'joe')
    assert done.exit_code == 0, done.output
    assert 'joe' in couch.beside(f'{name}-location', moves=False).request('GET', '/_security')['members']['names']


def test_command_moves_nothing_without_a_mark(couch: Client, url: str) -> None:
    done = command_for(url, url)('vacuum', '--rotate', '--no-wait', '--yes')
    assert done.exit_code == 0, done.output
    assert 'no tombstones were removed: run it again later' in done.stdout
    assert couch.present == couch.address.database
    with pytest.raises(DatabaseMissing):
        couch.beside(f'{couch.address.database}-location', moves=False).info()


def test_embedded_server_is_refused_with_one_sentence(client: Client, apache_couchdb: bool, url: str) -> None:
    if apache_couchdb:
        pytest.skip('this is Apache CouchDB, which can close a database')
    done = command_for(url, url)('vacuum', '--rotate', '--yes')
    assert done.exit_code == 1
    assert 'only Apache CouchDB can close a database while it is moved' in done.output
    assert 'Traceback' not in done.output
