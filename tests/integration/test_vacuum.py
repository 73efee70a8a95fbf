"""The vacuum: what it purges, what it keeps, and when it refuses to run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from celery import Celery
from click.testing import Result
from kombu import Connection

from celery_couchdb.testing import Server
from kombu_couchdb import design
from kombu_couchdb.admin import vacuum as module
from kombu_couchdb.admin.cluster import Refused
from kombu_couchdb.admin.vacuum import DeletedDocument, Progress, Report, Tombstones, vacuum
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import workitem
from kombu_couchdb.errors import AccessDenied
from kombu_couchdb.queues.databases import ensure
from tests.conftest import wait_for
from tests.support import Inbox, command_of, items, leave_leaf, publish

MESSAGE = {'body': '', 'headers': {}, 'properties': {}}
JOB = 'job:["q","t","k"]'
#: The age of tombstones that are purged must be longer than the lease.
SHORT_LEASE = {'visibility_timeout': 0.5}
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


def interrupt_at(stopped: str) -> Progress:
    """Return a progress that interrupts the vacuum in this step."""

    def interrupt(step: str, done: int, total: int) -> None:
        if step == stopped:
            raise KeyboardInterrupt

    return interrupt


def create(client: Client, count: int) -> list[Any]:
    """Store `count` WorkItems and return them with their revisions."""
    docs = [workitem.new(workitem.new_id(time.time()), 'q', MESSAGE, time.time()) for _ in range(count)]
    return write(client, docs)


def write(client: Client, docs: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [{**doc, '_rev': result.rev} for doc, result in zip(docs, client.bulk(docs), strict=True)]


def remove(client: Client, *doc_ids: str) -> list[str]:
    """Create and delete documents, and return the revisions of their tombstones."""
    docs = write(client, [{'_id': doc_id} for doc_id in doc_ids])
    return [result.rev for result in client.bulk([{**doc, '_deleted': True} for doc in docs])]


def index(client: Client, map_: str = 'function (doc) { emit(doc.type); }', **members: Any) -> None:
    """Store a design document of another program, with one view."""
    client.put({'_id': '_design/shop', 'autoupdate': False, 'views': {'all': {'map': map_}}, **members})


def finish(client: Client, count: int) -> list[str]:
    """Create, claim and delete `count` WorkItems, and return their ids."""
    claimed = write(client, [workitem.claim(doc, 'broker:consumer:x', 1.0) for doc in create(client, count)])
    client.bulk([workitem.deleted(doc) for doc in claimed])
    return [doc['_id'] for doc in claimed]


def vacuum_all(client: Client) -> int:
    """Vacuum until no tombstone is left, and return how many were purged.

    In a cluster, a node may receive a deletion after a vacuum has started. The next vacuum purges it.
    """
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
    """Make the marks of earlier vacuums older by `seconds`."""
    doc = client.get('_design/celery-marks')
    client.put({**doc, 'marks': [{**mark, 'date': mark['date'] - seconds} for mark in doc['marks']]})


# -- purging


def test_vacuum_removes_only_tombstones(couch: Client) -> None:
    finish(couch, 450)
    kept = create(couch, 20)
    report = vacuum(couch, quiet, age=0)
    assert (report.tombstones_before, report.purged, report.tombstones_after, report.young) == (450, 450, 0, 0)
    assert tombstones(couch) == set()
    assert [(doc['_id'], doc['_rev']) for doc in items(couch)] == [(doc['_id'], doc['_rev']) for doc in kept]
    assert len(rows(couch)) == 20
    assert all(row['doc'] for row in rows(couch))
    assert report.data_after < report.data_before


def test_foreign_tombstones_are_kept(couch: Client) -> None:
    index(couch, 'function (doc) { emit(doc._id); }', autoupdate=True)
    foreign = ['invoice-5', 'ab' * 16]
    ours = ['celery-task-meta-1', 'shop_celery-taskset-meta-1', 'chord-unlock-1', JOB, 'broker:queue:q']
    remove(couch, *foreign, *ours, 'once:' + 'ab' * 16)
    assert vacuum_all(couch) == 6
    assert tombstones(couch) == set(foreign)


def test_all_deleted_leaf_revisions_are_purged(couch: Client) -> None:
    doc_id = workitem.new_id(time.time())
    for rev in ('2-a', '2-b', '3-c'):
        leave_leaf(couch, doc_id, rev, _deleted=True)
    alive = workitem.new_id(time.time())
    leave_leaf(couch, alive, '2-a', _deleted=True)
    leave_leaf(couch, alive, '2-b', type='WorkItem')
    vacuum(couch, quiet, age=0)
    assert couch.known([doc_id, alive]) == {alive}
    assert couch.get(alive)['_rev'] == '2-b'


@pytest.fixture
def recreated(couch: Client) -> Callable[[], tuple[DeletedDocument, str]]:
    """A function that deletes a unique job, creates it again, and returns the tombstone and the new revision."""
    if couch.is_cluster():
        pytest.skip('which rows are lost depends on the node that responds')

    def recreated() -> tuple[DeletedDocument, str]:
        [deleted] = remove(couch, JOB)
        rev = couch.put({'_id': JOB, 'type': 'WorkItem', 'queue': 'q', 'n': 2})
        assert len(rows(couch)) == 1
        return DeletedDocument(JOB, (deleted,)), rev

    return recreated


def test_recreated_document_is_kept_unchanged(
    couch: Client, recreated: Callable[[], tuple[DeletedDocument, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The document is created between the reading of its tombstone and the purge."""
    remove(couch, JOB)
    monkeypatch.setattr(Tombstones, 'purge', between(Tombstones.purge, recreated))
    assert vacuum(couch, quiet, age=0).purged == 1
    assert couch.get(JOB)['n'] == 2
    [row] = rows(couch)
    assert row['doc']['n'] == 2


def test_vacuum_killed_right_after_a_purge(
    couch: Client, recreated: Callable[[], tuple[DeletedDocument, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vacuum records its purges first. The next vacuum finds documents that may have been created again."""
    remove(couch, JOB)
    with monkeypatch.context() as context:
        context.setattr(Tombstones, 'purge', between(Tombstones.purge, recreated))
        context.setattr(Tombstones, '_rewrite', killed)
        with pytest.raises(KeyboardInterrupt):
            vacuum(couch, quiet, age=0)
    assert rows(couch) == []
    vacuum(couch, quiet, age=0)
    assert [row['id'] for row in rows(couch)] == [JOB]
    assert couch.get('_local/celery-vacuum')['purging'] == []


def between(purge: Callable[..., None], act: Callable[[], object]) -> Callable[..., None]:
    """Return a replacement for `purge` that calls a function first."""

    def purged(self: Tombstones, tombstones: list[DeletedDocument]) -> None:
        act()
        purge(self, tombstones)

    return purged


def killed(self: Tombstones, ids: list[str]) -> None:
    if ids:
        raise KeyboardInterrupt


# -- age


def test_young_tombstones_are_kept(couch: Client) -> None:
    first = finish(couch, 120)
    report = vacuum(couch, quiet, age=300, wait=False)
    assert (report.marked, report.purged) == (False, 0)  # no tombstone is known to be old
    assert tombstones(couch) == set(first)
    backdate(couch, 301)
    second = finish(couch, 130)
    report = vacuum(couch, quiet, age=300, wait=False)
    assert (report.marked, report.purged, report.young) == (True, 120, 130)
    assert tombstones(couch) == set(second)


def test_vacuum_waits_until_tombstones_are_old_enough(couch: Client) -> None:
    finish(couch, 10)
    seen: list[str] = []
    began = time.monotonic()
    assert vacuum(couch, lambda step, done, total: seen.append(step), age=1.5).purged == 10
    assert time.monotonic() - began >= 1.5
    assert seen[0] == 'wait'


def test_interrupted_wait_is_not_repeated(couch: Client) -> None:
    finish(couch, 10)
    with pytest.raises(KeyboardInterrupt):
        vacuum(couch, interrupt_at('wait'), age=300)
    backdate(couch, 299)
    began = time.monotonic()
    assert vacuum(couch, quiet, age=300).purged == 10
    assert time.monotonic() - began < 60


def test_member_cannot_forge_older_marks(couch: Client, server: Server, member: dict[str, str]) -> None:
    couch.request('PUT', '/_security', body={'admins': {'roles': ['_admin']}, 'members': {'names': [member['user']]}})
    finish(couch, 3)
    user = server.client(couch.address.database, **member)
    forged = {'marks': [{'seq': couch.sequence(), 'date': 0.0}], 'purging': ['invoice']}
    user.put({'_id': '_local/celery-vacuum', **forged})
    with pytest.raises(AccessDenied):
        user.put({'_id': '_design/celery-marks', **forged})
    report = vacuum(couch, quiet, age=300, wait=False)
    assert (report.purged, report.marked) == (0, False)
    assert vacuum(couch, quiet, age=0).purged == 3


# -- indexes


def test_rows_leave_an_index_that_had_not_seen_the_deletions(couch: Client) -> None:
    views = {'lib': {'a': 'exports.a = 1'}, 'all': {'map': 'function (doc) { emit(doc.type); }'}}
    index(couch, views=views)
    docs = create(couch, 300)
    wait_for(lambda: len(couch.view('shop', 'all')) == 300, 'the index')
    couch.bulk([workitem.deleted(doc) for doc in docs])
    assert vacuum_all(couch) == 300  # the vacuum compacts that index, too
    assert couch.view('shop', 'all') == []
    assert rows(couch) == []


def test_couchdb_keeps_no_rows_and_few_purges_because_of_unread_design_documents(couch: Client) -> None:
    finish(couch, 10)
    vacuum(couch, quiet, age=0)  # its compaction takes all design documents into account, also the one with the marks
    index(couch)
    couch.request('GET', '/_design/shop/_info')  # from now on CouchDB takes this index into account
    couch.request('PUT', '/_purged_infos_limit', body=10)
    finish(couch, 1500)
    create(couch, 3)
    assert vacuum(couch, quiet, age=0).without_views == []
    assert [bool(row['doc']) for row in couch.view('shop', 'all', include_docs=True)] == [True] * 3
    # 56,000 to 72,000; with all purges 189,000 (CouchDB 3.5)
    assert couch.request('GET', '')['sizes']['active'] < 100_000


def test_index_that_cannot_be_built_stops_the_vacuum(couch: Client) -> None:
    couch.put({'_id': '_design/odd', 'language': 'cobol', 'views': {'all': {'map': 'MOVE'}}, 'autoupdate': False})
    finish(couch, 10)
    with pytest.raises(Refused, match=r'_design/odd: this index cannot be brought up to date'):
        vacuum(couch, quiet, age=0)
    assert len(tombstones(couch)) == 10


def test_design_documents_without_views_do_not_stop_the_vacuum(couch: Client, run: Callable[..., Result]) -> None:
    couch.put({'_id': '_design/filters', 'filters': {'a': 'function () { return true; }'}})
    couch.request('POST', '/_index', body={'index': {'fields': ['queue']}, 'ddoc': 'mango'})
    finish(couch, 10)
    done = run('--yes', '--age', '0.6')
    assert done.exit_code == 0, done.output
    assert tombstones(couch) == set()
    assert 'keeps a note of each purge because of design documents without a view; ' in done.stdout
    assert done.stdout.endswith('give each of them a view: filters\n')


# -- interruptions, and running workers


def test_interrupted_vacuum_continues_later(couch: Client) -> None:
    finish(couch, 600)
    alive = {doc['_id'] for doc in create(couch, 10)}
    with pytest.raises(KeyboardInterrupt):
        vacuum(couch, interrupt_at('purge'), age=0)
    assert 0 < len(tombstones(couch)) < 600
    assert {row['id'] for row in rows(couch)} == alive
    assert 0 < vacuum_all(couch) < 600
    assert tombstones(couch) == set()
    assert {row['id'] for row in rows(couch)} == alive


def test_workers_run_during_a_vacuum(couch: Client, connect: Callable[..., Connection]) -> None:
    finish(couch, 1000)
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
        wait_for(lambda: len(inbox.bodies) > 5, 'the worker to receive messages')
        report = vacuum(couch, quiet, age=0)
    finally:
        end.set()
        worker.join()
    assert report.purged >= 1000
    inbox.wait(len(sent))
    assert sorted(inbox.bodies) == sent
    wait_for(lambda: not items(couch), 'all messages to be acknowledged')
    assert rows(couch) == [row for row in rows(couch) if row['doc']]


# -- refusals


def test_vacuum_needs_an_administrator(couch: Client, server: Server, member: dict[str, str]) -> None:
    names = {'names': [member['user']]}
    couch.request('PUT', '/_security', body={'admins': names, 'members': names})
    finish(couch, 3)
    user = server.client(couch.address.database, **member)
    with pytest.raises(AccessDenied, match=rf"user '{member['user']}' is no server administrator.*--admin") as caught:
        vacuum(user, quiet)
    assert member['password'] not in str(caught.value)
    assert len(tombstones(couch)) == 3


# -- the command


def vacuum_of(url: str, results: str, **options: float) -> Callable[..., Result]:
    """Return a function that runs `couchdb vacuum` for an app with these URLs and transport options."""
    app = Celery('vacuumed', set_as_current=False, broker=url, backend=results)
    app.conf.broker_transport_options = options
    return partial(command_of(app), 'vacuum')


@pytest.fixture
def run(url: str) -> Callable[..., Result]:
    """A function that runs `couchdb vacuum` for an app with broker and results in one database."""
    return vacuum_of(url, url, **SHORT_LEASE)


def test_command_asks_for_confirmation_and_reports_the_results(couch: Client, run: Callable[..., Result]) -> None:
    finish(couch, 120)
    done = run('--age', '0.6', answer='n\n')
    assert done.exit_code == 1
    assert couch.address.url in done.output
    done = run('--yes', '--no-wait')
    assert done.exit_code == 0
    assert 'run it again later' in done.stdout
    assert len(tombstones(couch)) == 120
    done = run('--age', '0.6', answer='y\n')
    assert done.exit_code == 0, done.output
    assert done.stdout.count('120 → 0 ') == 1  # broker and results share the database, which is vacuumed once
    assert f'{couch.address.database}  ' in done.stdout
    assert tombstones(couch) == set()


def test_command_skips_a_missing_database(couch: Client, server: Server, url: str) -> None:
    done = vacuum_of(url, server.couchdb_url(f'{couch.address.database}-results'), **SHORT_LEASE)(
        '--yes', '--age', '0.6'
    )
    assert done.exit_code == 0, done.output
    assert 'does not exist yet' in done.output
    assert couch.address.database in done.stdout


def test_interrupted_command_says_how_to_continue(
    couch: Client, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(couch, 3)
    monkeypatch.setattr(module._Vacuum, '_compact', lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    done = run('--yes', '--age', '0.6')
    assert done.exit_code == 1
    assert 'another run continues' in done.output
    assert 'Traceback' not in done.output


def test_embedded_server_is_refused_with_one_sentence(
    client: Client, apache_couchdb: bool, run: Callable[..., Result]
) -> None:
    if apache_couchdb:
        pytest.skip('this is Apache CouchDB, which can purge')
    done = run('--yes')
    assert done.exit_code == 1
    assert 'is the embedded server' in done.output
    assert 'Traceback' not in done.output


# -- default age


def test_age_shorter_than_the_lease_is_refused(client: Client, url: str) -> None:
    done = vacuum_of(url, url)('--yes', '--age', '60')
    assert done.exit_code == 2
    assert done.stderr.endswith(
        "Error: Invalid value for '--age': 60 is not longer than the visibility timeout of the workers, 60 s.\n"
    )


def test_leases_of_workers_of_other_apps_count(client: Client, run: Callable[..., Result]) -> None:
    now = time.time()
    heartbeats: dict[str, dict[str, Any]] = {
        'a': {'date': now - 1, 'expires': now + 899},
        'malformed': {'date': 'now', 'expires': now + 9999},
        'expired': {'date': 0, 'expires': now - 1},
        'forged': {'date': now, 'expires': now + 1e9},
    }
    client.bulk([{'_id': f'broker:consumer:{name}', 'type': 'Consumer', **doc} for name, doc in heartbeats.items()])
    done = run('--yes', '--age', '600')
    assert done.exit_code == 2
    assert '600 is not longer than the visibility timeout of the workers, 900 s.' in done.stderr


def test_default_age_is_longer_than_any_lease(
    client: Client, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    ages: list[float] = []

    def vacuum(client: Client, show: object, *, age: float, **_: bool) -> Report:
        ages.append(age)
        return Report(client.address.database, 0, 0, 0)

    monkeypatch.setattr('celery_couchdb.cli.vacuum.vacuum', vacuum)
    run('--yes')
    client.put({'_id': 'broker:consumer:a', 'type': 'Consumer', 'date': time.time(), 'expires': time.time() + 900})
    run('--yes')
    databases = 2  # with that of broadcasts
    assert ages == [300.0] * databases + [pytest.approx(960.0, abs=1.0)] * databases
