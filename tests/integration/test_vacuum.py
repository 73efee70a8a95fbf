"""The vacuum: what it takes away, what it leaves, and when it does nothing at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner, Result
from kombu import Connection

from celery_couchdb.cli import couchdb
from kombu_couchdb import design
from kombu_couchdb.admin import vacuum as module
from kombu_couchdb.admin.cluster import Refused
from kombu_couchdb.admin.tombstones import Tombstone, Tombstones
from kombu_couchdb.admin.vacuum import Report, longest_lease, vacuum
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import workitem
from kombu_couchdb.errors import AccessDenied
from kombu_couchdb.queues.database import ensure
from tests.conftest import Server, wait_for
from tests.support import Inbox, items, publish

MESSAGE = {'body': '', 'headers': {}, 'properties': {}}
JOB = 'job:["q","t","k"]'
VIEWS = ('waiting', 'leases', 'dead', 'expiring')


@pytest.fixture
def couch(client: Client, apache_couchdb: bool) -> Client:
    """The test's database, set up, on Apache CouchDB."""
    if not apache_couchdb:
        pytest.skip('the embedded server keeps everything in memory and cannot purge')
    ensure(client, True)
    return client


def quiet(step: str, done: int, total: int) -> None:
    """Show no progress."""


def create(client: Client, count: int) -> list[dict[str, Any]]:
    """Store so many WorkItems and return them with their revisions."""
    docs = [workitem.new(workitem.new_id(time.time()), 'q', MESSAGE, time.time()) for _ in range(count)]
    return write(client, docs)


def write(client: Client, docs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**doc, '_rev': answer['rev']} for doc, answer in zip(docs, client.bulk(docs), strict=True)]


def finish(client: Client, count: int) -> list[str]:
    """Let so many WorkItems be created, claimed and done, and return their ids."""
    claimed = write(client, [workitem.claim(doc, 'broker:consumer:x', 1.0) for doc in create(client, count)])
    client.bulk([workitem.deleted(doc) for doc in claimed])
    return [doc['_id'] for doc in claimed]


def vacuum_all(client: Client) -> int:
    """Return how many tombstones went. In a cluster a copy may hear of a deletion when a vacuum has begun: the next takes it."""
    reports = [vacuum(client, quiet, age=0)]
    while reports[-1].young:
        reports.append(vacuum(client, quiet, age=0))
    return sum(report.purged for report in reports)


def tombstones(client: Client) -> set[str]:
    """Return the ids of the tombstones in a database."""
    changes = client.request('GET', '/_changes')
    return {row['id'] for row in changes['results'] if row.get('deleted')}


def rows(client: Client) -> list[Any]:
    """Return all rows of the broker's views, with their documents."""
    return [row for view in VIEWS for row in client.view(design.NAME, view, reduce=False, include_docs=True)]


def backdate(client: Client, seconds: float) -> None:
    """Let the marks of earlier vacuums be older."""
    doc = client.get('_design/celery-marks')
    client.put({**doc, 'marks': [{**mark, 'date': mark['date'] - seconds} for mark in doc['marks']]})


# -- what is taken away


def test_tombstones_go_and_nothing_else(couch: Client) -> None:
    finish(couch, 450)
    kept = create(couch, 20)
    report = vacuum(couch, quiet, age=0)
    assert (report.tombstones_before, report.purged, report.tombstones_after, report.young) == (450, 450, 0, 0)
    assert tombstones(couch) == set()
    assert [(doc['_id'], doc['_rev']) for doc in items(couch)] == [(doc['_id'], doc['_rev']) for doc in kept]
    assert len(rows(couch)) == 20
    assert all(row['doc'] for row in rows(couch))
    assert report.data_after < report.data_before


def test_tombstones_of_others_are_theirs(couch: Client) -> None:
    couch.put({'_id': '_design/shop', 'views': {'all': {'map': 'function (doc) { emit(doc._id); }'}}})
    foreign = ['invoice-5', 'ab' * 16]
    couch.bulk([{'_id': doc_id, '_rev': couch.put({'_id': doc_id}), '_deleted': True} for doc_id in foreign])
    couch.bulk(
        [
            {'_id': doc_id, '_rev': couch.put({'_id': doc_id}), '_deleted': True}
            for doc_id in (
                'celery-task-meta-1',
                'shop_celery-taskset-meta-1',
                'chord-unlock-1',
                JOB,
                'broker:queue:q',
                'once:' + 'ab' * 16,
            )
        ]
    )
    assert vacuum_all(couch) == 6
    assert tombstones(couch) == set(foreign)


def test_all_revisions_of_a_torn_document_go(couch: Client) -> None:
    doc_id = workitem.new_id(time.time())
    for rev in ('2-a', '2-b', '3-c'):
        couch.request(
            'POST', '/_bulk_docs', body={'new_edits': False, 'docs': [{'_id': doc_id, '_rev': rev, '_deleted': True}]}
        )
    alive = workitem.new_id(time.time())
    couch.request(
        'POST',
        '/_bulk_docs',
        body={
            'new_edits': False,
            'docs': [
                {'_id': alive, '_rev': '2-a', '_deleted': True},
                {'_id': alive, '_rev': '2-b', 'type': 'WorkItem'},
            ],
        },
    )
    vacuum(couch, quiet, age=0)
    assert couch.known([doc_id, alive]) == {alive}
    assert couch.get(alive)['_rev'] == '2-b'


@pytest.fixture
def reborn(couch: Client) -> Callable[[], tuple[Tombstone, str]]:
    """Returns a function that deletes a unique job and enqueues it anew: the tombstone, and the revision of what lives."""
    if couch.is_cluster():
        pytest.skip('which rows are lost depends on the copy that answers')

    def reborn() -> tuple[Tombstone, str]:
        deleted = couch.bulk([{'_id': JOB, '_rev': couch.put({'_id': JOB}), '_deleted': True}])[0].rev
        rev = couch.put({'_id': JOB, 'type': 'WorkItem', 'queue': 'q', 'n': 2})
        assert len(rows(couch)) == 1
        return Tombstone(JOB, (deleted,)), rev

    return reborn


def test_couchdb_loses_the_rows_of_what_lives_again(couch: Client, reborn: Callable[[], tuple[Tombstone, str]]) -> None:
    """The trap that the next tests are about: should this fail, it is gone, and so may be what avoids it."""
    tombstone, rev = reborn()
    couch.request('POST', '/_purge', body={tombstone.id: list(tombstone.revs)})
    assert couch.get(JOB)['_rev'] == rev
    assert rows(couch) == []


def test_document_that_lives_again_stays_as_it_is(
    couch: Client, reborn: Callable[[], tuple[Tombstone, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is created between the reading of its tombstone and the purge."""
    couch.bulk([{'_id': JOB, '_rev': couch.put({'_id': JOB}), '_deleted': True}])
    monkeypatch.setattr(Tombstones, 'purge', between(Tombstones.purge, reborn))
    assert vacuum(couch, quiet, age=0).purged == 1
    assert couch.get(JOB)['n'] == 2
    [row] = rows(couch)
    assert row['doc']['n'] == 2


def test_killed_just_after_a_purge(
    couch: Client, reborn: Callable[[], tuple[Tombstone, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next vacuum finds in its note what may have lived again."""
    couch.bulk([{'_id': JOB, '_rev': couch.put({'_id': JOB}), '_deleted': True}])
    with monkeypatch.context() as context:
        context.setattr(Tombstones, 'purge', between(Tombstones.purge, reborn))
        context.setattr(Tombstones, '_revive', killed)
        with pytest.raises(KeyboardInterrupt):
            vacuum(couch, quiet, age=0)
    assert rows(couch) == []
    vacuum(couch, quiet, age=0)
    assert [row['id'] for row in rows(couch)] == [JOB]
    assert couch.get('_local/celery-vacuum')['purging'] == []


def between(purge: Callable[..., None], act: Callable[[], object]) -> Callable[..., None]:
    """Return `purge`, before which something happens."""

    def purged(self: Tombstones, tombstones: list[Tombstone]) -> None:
        act()
        purge(self, tombstones)

    return purged


def killed(self: Tombstones, ids: list[str]) -> None:
    if ids:
        raise KeyboardInterrupt


def test_it_tidies_too(couch: Client) -> None:
    couch.put({'_id': 'broker:consumer:a', 'type': 'Consumer', 'expires': 1})
    couch.put({'_id': 'broker:broadcast:a', 'type': 'Broadcast', 'expires': 1})
    assert vacuum(couch, quiet, age=0).tidied == {'bindings': 0, 'broadcasts': 1, 'consumers': 1}
    assert couch.fetch(['broker:consumer:a', 'broker:broadcast:a']) == [None, None]


def test_it_waits_for_the_proof_that_bindings_are_orphans(couch: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    couch.put({'_id': 'broker:binding:a', 'type': 'Binding', 'queue': 'gone'})
    assert vacuum(couch, quiet, age=0, wait=False).tidied == {}
    monkeypatch.setattr('kombu_couchdb.leases.janitor._ORPHAN_SECONDS', 3.0)
    assert vacuum(couch, quiet, age=0).tidied['bindings'] == 1


# -- what is old


def test_what_is_not_old_enough_stays(couch: Client) -> None:
    first = finish(couch, 120)
    report = vacuum(couch, quiet, age=300, wait=False)
    assert (report.marked, report.purged) == (False, 0)  # nothing is known to be old
    assert tombstones(couch) == set(first)
    backdate(couch, 301)
    second = finish(couch, 130)
    report = vacuum(couch, quiet, age=300, wait=False)
    assert (report.marked, report.purged, report.young) == (True, 120, 130)
    assert tombstones(couch) == set(second)


def test_it_waits_until_what_is_there_is_old_enough(couch: Client) -> None:
    finish(couch, 10)
    seen: list[str] = []
    began = time.monotonic()
    assert vacuum(couch, lambda step, done, total: seen.append(step), age=1.5).purged == 10
    assert time.monotonic() - began >= 1.5
    assert seen[0] == 'wait'


def test_an_interrupted_wait_is_not_waited_again(couch: Client) -> None:
    def interrupt(step: str, done: int, total: int) -> None:
        if step == 'wait':
            raise KeyboardInterrupt

    finish(couch, 10)
    with pytest.raises(KeyboardInterrupt):
        vacuum(couch, interrupt, age=300)
    backdate(couch, 299)
    began = time.monotonic()
    assert vacuum(couch, quiet, age=300).purged == 10
    assert time.monotonic() - began < 60


def test_an_earlier_mark_saves_the_wait(couch: Client) -> None:
    finish(couch, 10)
    vacuum(couch, quiet, age=300, wait=False)
    backdate(couch, 301)
    seen: list[str] = []
    assert vacuum(couch, lambda step, done, total: seen.append(step), age=300).purged == 10
    assert 'wait' not in seen


def test_a_member_cannot_make_tombstones_older(
    couch: Client, server: Server, users: Callable[[str, str], None]
) -> None:
    name = f'user-{couch.address.database}'
    users(name, 'secret-word')
    couch.request('PUT', '/_security', body={'admins': {'roles': ['_admin']}, 'members': {'names': [name]}})
    finish(couch, 3)
    member = server.client(couch.address.database, user=name, password='secret-word')
    forged = {'marks': [{'seq': couch.sequence(), 'date': 0.0}], 'purging': ['invoice']}
    member.put({'_id': '_local/celery-vacuum', **forged})
    with pytest.raises(AccessDenied):
        member.put({'_id': '_design/celery-marks', **forged})
    report = vacuum(couch, quiet, age=300, wait=False)
    assert (report.purged, report.marked) == (0, False)
    assert vacuum(couch, quiet, age=0).purged == 3


# -- the traps


def test_no_row_stays_in_an_index_that_had_not_seen_the_deletions(couch: Client) -> None:
    couch.put(
        {
            '_id': '_design/shop',
            'autoupdate': False,
            'views': {'lib': {'a': 'exports.a = 1'}, 'all': {'map': 'function (doc) { emit(doc.type); }'}},
        }
    )
    docs = create(couch, 300)
    wait_for(lambda: len(couch.view('shop', 'all')) == 300, 'the index')
    couch.bulk([workitem.deleted(doc) for doc in docs])
    assert vacuum_all(couch) == 300  # it compacts that index, too
    assert couch.view('shop', 'all') == []
    assert rows(couch) == []


def test_an_index_that_was_never_read_keeps_nothing(couch: Client) -> None:
    couch.put(
        {'_id': '_design/shop', 'autoupdate': False, 'views': {'all': {'map': 'function (doc) { emit(doc.type); }'}}}
    )
    finish(couch, 300)
    create(couch, 3)
    vacuum(couch, quiet, age=0)
    assert [bool(row['doc']) for row in couch.view('shop', 'all', include_docs=True)] == [True] * 3


def test_an_index_that_was_never_read_does_not_make_couchdb_remember_all_purges(couch: Client) -> None:
    couch.put(
        {'_id': '_design/shop', 'autoupdate': False, 'views': {'all': {'map': 'function (doc) { emit(doc.type); }'}}}
    )
    couch.request('GET', '/_design/shop/_info')  # from here on CouchDB counts with it
    couch.request('PUT', '/_purged_infos_limit', body=10)
    finish(couch, 1500)
    vacuum(couch, quiet, age=0)
    assert couch.request('GET', '')['sizes']['active'] < 65_000


def test_an_index_that_cannot_be_built_stops_it(couch: Client) -> None:
    couch.put({'_id': '_design/odd', 'language': 'cobol', 'views': {'all': {'map': 'MOVE'}}, 'autoupdate': False})
    finish(couch, 10)
    with pytest.raises(Refused, match=r'_design/odd: this index cannot be brought up to date'):
        vacuum(couch, quiet, age=0)
    assert len(tombstones(couch)) == 10


def test_design_documents_without_views_do_not_matter(couch: Client) -> None:
    couch.put({'_id': '_design/filters', 'filters': {'a': 'function () { return true; }'}})
    couch.request('POST', '/_index', body={'index': {'fields': ['queue']}, 'ddoc': 'mango'})
    finish(couch, 10)
    assert vacuum(couch, quiet, age=0).purged == 10


# -- interrupted, and beside workers


def test_interrupted_it_goes_on_with_the_rest(couch: Client) -> None:
    finish(couch, 600)
    alive = {doc['_id'] for doc in create(couch, 10)}

    def interrupt(step: str, done: int, total: int) -> None:
        if step == 'purge':
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vacuum(couch, interrupt, age=0)
    assert 0 < len(tombstones(couch)) < 600
    assert {row['id'] for row in rows(couch)} == alive
    assert 0 < vacuum_all(couch) < 600
    assert tombstones(couch) == set()
    assert {row['id'] for row in rows(couch)} == alive


def test_workers_go_on_meanwhile(couch: Client, connect: Callable[..., Connection]) -> None:
    finish(couch, 2000)
    inbox, publisher, end = Inbox(connect()), connect(), threading.Event()
    sent: list[int] = []

    def work() -> None:
        while not end.is_set():
            publish(publisher, len(sent))
            sent.append(len(sent))
            inbox.drain(0.01)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        wait_for(lambda: len(inbox.bodies) > 5, 'the worker to be at work')
        report = vacuum(couch, quiet, age=0)
    finally:
        end.set()
        worker.join()
    assert report.purged >= 2000
    inbox.wait(len(sent))
    assert sorted(inbox.bodies) == sent
    wait_for(lambda: not items(couch), 'all to be acknowledged')
    assert rows(couch) == [row for row in rows(couch) if row['doc']]


# -- who may not, and where not


def test_the_embedded_server_is_refused(client: Client, apache_couchdb: bool) -> None:
    if apache_couchdb:
        pytest.skip('this is Apache CouchDB')
    with pytest.raises(Refused, match='is the embedded server'):
        vacuum(client, quiet)


def test_a_member_is_told_that_it_takes_an_administrator(
    couch: Client, server: Server, users: Callable[[str, str], None]
) -> None:
    name = f'user-{couch.address.database}'
    users(name, 'secret-word')
    couch.request('PUT', '/_security', body={'admins': {'names': [name]}, 'members': {'names': [name]}})
    finish(couch, 3)
    member = server.client(couch.address.database, user=name, password='secret-word')
    with pytest.raises(AccessDenied, match=rf"user '{name}' is no server administrator.*--admin") as caught:
        vacuum(member, quiet)
    assert 'secret-word' not in str(caught.value)
    assert len(tombstones(couch)) == 3


# -- the command


@pytest.fixture
def run(server: Server, url: str) -> Callable[..., Result]:
    """Returns a function that runs `couchdb vacuum` with some arguments, for an app with broker and results in one database."""
    app = Celery('vacuumed', set_as_current=False, broker=url, backend=url)
    app.conf.broker_transport_options = {'visibility_timeout': 0.5}

    def run(*arguments: str, **more: Any) -> Result:
        return CliRunner().invoke(couchdb, ['vacuum', *arguments], obj=SimpleNamespace(app=app, no_color=True), **more)

    return run


def test_command_tells_what_it_did(couch: Client, run: Callable[..., Result]) -> None:
    finish(couch, 120)
    couch.put({'_id': 'broker:broadcast:a', 'type': 'Broadcast', 'expires': 1})
    done = run('--yes', '--age', '0.6')
    assert done.exit_code == 0, done.output
    assert done.stdout.count('→ 1 ') == 1  # broker and results share it: once is enough
    assert f'{couch.address.database}  ' in done.stdout
    assert '120 → 1 ' in done.stdout
    assert 'deleted: broadcasts 1\n' in done.stdout
    assert 'left for another run: 1\n' in done.stdout  # the tombstone of the broadcast
    assert tombstones(couch) == {'broker:broadcast:a'}


def test_command_asks_first(couch: Client, run: Callable[..., Result]) -> None:
    finish(couch, 3)
    done = run('--age', '0.6', input='n\n')
    assert done.exit_code == 1
    assert couch.address.url in done.output
    assert len(tombstones(couch)) == 3
    assert run('--age', '0.6', input='y\n').exit_code == 0
    assert tombstones(couch) == set()


def test_command_without_an_earlier_mark_says_that_it_took_nothing(couch: Client, run: Callable[..., Result]) -> None:
    finish(couch, 3)
    done = run('--yes', '--no-wait')
    assert done.exit_code == 0
    assert 'run it again later' in done.stdout
    assert len(tombstones(couch)) == 3


def test_command_passes_over_a_database_that_does_not_exist(couch: Client, server: Server, url: str) -> None:
    app = Celery(
        'new', set_as_current=False, broker=url, backend=server.couchdb_url(f'{couch.address.database}-results')
    )
    app.conf.broker_transport_options = {'visibility_timeout': 0.5}
    done = CliRunner().invoke(couchdb, ['vacuum', '--yes', '--age', '0.6'], obj=SimpleNamespace(app=app, no_color=True))
    assert done.exit_code == 0, done.output
    assert 'does not exist yet' in done.output
    assert couch.address.database in done.stdout


def test_command_that_is_stopped_says_how_to_go_on(
    couch: Client, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(couch, 3)
    monkeypatch.setattr(module._Vacuum, '_compact', lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    done = run('--yes', '--age', '0.6')
    assert done.exit_code == 1
    assert 'another run goes on' in done.output
    assert 'Traceback' not in done.output


def test_command_refuses_in_one_sentence(client: Client, apache_couchdb: bool, run: Callable[..., Result]) -> None:
    if apache_couchdb:
        pytest.skip('this is Apache CouchDB, which can purge')
    done = run('--yes')
    assert done.exit_code == 1
    assert 'is the embedded server' in done.output
    assert 'Traceback' not in done.output


# -- how old


@pytest.mark.parametrize('age', ['0', '10', '60'])
def test_an_age_within_the_lease_is_refused(client: Client, url: str, age: str) -> None:
    app = Celery('vacuumed', set_as_current=False, broker=url, backend=url)
    done = CliRunner().invoke(couchdb, ['vacuum', '--yes', '--age', age], obj=SimpleNamespace(app=app, no_color=True))
    assert done.exit_code == 2
    assert done.stderr.endswith(
        f"Error: Invalid value for '--age': {age} is not longer than the visibility timeout of the workers, 60 s.\n"
    )


def test_the_lease_of_a_worker_of_another_app_counts_while_it_lives(client: Client, run: Callable[..., Result]) -> None:
    beat = {'_id': 'broker:consumer:a', 'type': 'Consumer', 'date': time.time() - 1, 'expires': time.time() + 899}
    spoilt = {'_id': 'broker:consumer:b', 'type': 'Consumer', 'date': 'now', 'expires': time.time() + 9999}
    client.bulk([beat, spoilt, {**beat, '_id': 'broker:consumer:c', 'date': 0, 'expires': time.time() - 1}])
    done = run('--yes', '--age', '600')
    assert done.exit_code == 2
    assert '600 is not longer than the visibility timeout of the workers, 900 s.' in done.stderr


def test_by_default_it_is_longer_than_any_lease(
    client: Client, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    ages: list[float] = []

    def vacuum(client: Client, show: object, *, age: float, wait: bool) -> Report:
        ages.append(age)
        return Report(client.address.database, 0, 0, 0)

    monkeypatch.setattr('celery_couchdb.cli.vacuum.vacuum', vacuum)
    run('--yes')
    client.put({'_id': 'broker:consumer:a', 'type': 'Consumer', 'date': time.time(), 'expires': time.time() + 900})
    run('--yes')
    assert ages == [300.0, pytest.approx(960.0, abs=1.0)]


def test_a_forged_heartbeat_keeps_nothing_from_being_purged(client: Client) -> None:
    now = client.clock.now()
    client.bulk(
        [
            {'_id': f'broker:consumer:{seconds}', 'type': 'Consumer', 'date': now, 'expires': now + seconds}
            for seconds in (90.0, 1e9)
        ]
    )
    assert longest_lease(client) == pytest.approx(90.0, abs=0.01)
