"""`celery couchdb regions`: databases of regions are set up, and tasks that were given away are shown and changed.

Most tests write the documents that the workers of both regions write.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import Result

from celery_couchdb.contrib.regions import where
from celery_couchdb.testing import Server
from kombu_couchdb.contrib.parcels.devices import DEVICE
from kombu_couchdb.contrib.parcels.parcel import moved_id
from kombu_couchdb.contrib.regions import records, region
from kombu_couchdb.leases.leader import LeaderLease
from tests.conftest import Users
from tests.regions import Region, Regions, regions_on
from tests.support import command_of


@pytest.fixture
def regions(server: Server) -> Iterator[Regions]:
    """The regions `eu` and `us`."""
    with regions_on(server, 'eu', 'us') as regions:
        yield regions


@pytest.fixture
def eu(regions: Regions) -> Region:
    return regions['eu']


@pytest.fixture
def us(regions: Regions) -> Region:
    return regions['us']


def run(site: Region, *given: str) -> Result:
    """Run a command in a region; its output contains no password."""
    done = command_of(site.app)(*given)
    assert f':{site.server.password}@' not in done.output
    return done


def succeed(site: Region, *given: str) -> str:
    """Return the output of a command of regions."""
    done = run(site, 'regions', *given)
    assert done.exit_code == 0, done.output
    return done.output


def fail(site: Region, *given: str) -> str:
    """Return the output of a command of regions that fails."""
    done = run(site, 'regions', *given)
    assert done.exit_code == 1, done.output
    return done.output


def status(site: Region) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the region has for the only other one, and what that has for this one."""
    outgoing, incoming = (json.loads(line) for line in succeed(site, 'status', '--json').splitlines())
    return outgoing, incoming


def numbers(site: Region) -> dict[str, int]:
    """Return the numbers of what the region has for the only other one."""
    return {state: tally['count'] for state, tally in status(site)[0]['numbers'].items()}


def give(site: Region, task_id: str = '', *, to: str = 'us', age: float = 0.0, **members: Any) -> str:
    """Store the record of a task that a region gave to another one; return its document id."""
    task_id = task_id or str(uuid.uuid4())
    doc = {
        '_id': region.record_id(to, task_id, uuid.uuid4().hex),
        'type': 'Parcel',
        'task': 'shop.add',
        'id': task_id,
        'exchange': '',
        'routing_key': 'celery',
        'published': site.broker.clock.now() - age,
        'message': {'body': '', 'headers': {'task': 'shop.add', 'id': task_id}, 'properties': {}},
    }
    site.regions.put({**doc, **members})
    return str(doc['_id'])


def words(output: str) -> list[str]:
    """Return what happened to each step: `done`, `ok`, `note` or `not yet`."""
    return [line[2:9].strip() for line in output.splitlines() if line.startswith('  ')]


def returned(date: float) -> dict[str, Any]:
    """Return the document of a result that waits for the region `eu`."""
    return {'_id': 'r:eu:task:tag', 'type': 'Returned', 'date': date, 'result': {}}


def lead(site: Region) -> None:
    """Let this process lead in a region."""
    LeaderLease(site.broker, f'region:{site.name}', node=f'w1@{site.name}').step()


# -- setup


def test_setup_creates_the_database_and_says_what_is_missing_elsewhere(eu: Region, us: Region) -> None:
    for site in (eu, us):
        site.regions.delete()
    output = succeed(eu, 'setup', '--dry-run')
    assert 'not yet' in words(output)
    assert 'region us is not set up yet: run "couchdb regions setup" there' in output
    assert 'done' in words(succeed(eu, 'setup'))
    succeed(us, 'setup')
    assert words(succeed(eu, 'setup')) == ['ok', 'ok']
    assert eu.regions.info()['doc_count'] == 0


def test_setup_needs_no_administrator_if_all_is_there(eu: Region, us: Region, member: dict[str, str]) -> None:
    eu.options['regions']['eu'] = eu.server.couchdb_url(eu.regions.address.database, **member)
    succeed(eu, 'setup')
    eu.app.conf.broker_url = eu.server.couchdb_url(eu.broker.address.database, **member)
    assert 'done' not in words(succeed(eu, 'setup'))
    eu.regions.delete()
    assert 'name an administrator of CouchDB with --admin' in fail(eu, 'setup')


def test_setup_says_how_a_region_becomes_readable(eu: Region, us: Region, users: Users, member: dict[str, str]) -> None:
    database = us.regions.address.database
    succeed(us, 'setup', '--member', f'nobody-{member["user"]}')  # the database is open to its members only
    eu.options['regions']['us'] = us.server.couchdb_url(database, member['user'], 'wrong')
    assert 'create its user there, or correct its URL' in succeed(eu, 'setup')
    eu.options['regions']['us'] = us.server.couchdb_url(database, **member)
    assert f'run "couchdb regions setup --member {member["user"]}" there' in succeed(eu, 'setup')
    assert 'region us cannot be read yet: run ' in fail(eu, 'status', '--check')
    us.options['regions']['us'] = eu.options['regions']['us']  # the user in the region's own URL becomes a member
    succeed(us, 'setup')
    assert 'note' not in words(succeed(eu, 'setup'))


@pytest.mark.parametrize('use', ['broker', 'broadcasts', 'results', 'parcels', 'device', 'region'])
def test_setup_refuses_a_database_of_other_use(eu: Region, us: Region, use: str) -> None:
    eu.options['parcels'] = 'parcels-of-eu'
    databases = {
        'broker': eu.broker.address.database,
        'broadcasts': f'{eu.broker.address.database}-broadcasts',
        'results': eu.results.address.database,
        'parcels': 'parcels-of-eu',
        'device': 'parcels-of-eu-bob',
    }
    device = {'_id': f'{DEVICE}bob', 'type': 'Device', 'name': 'bob', 'database': databases['device'], 'date': 1.0}
    eu.broker.put(device)
    eu.options['regions']['eu'] = us.url() if use == 'region' else eu.server.couchdb_url(databases[use])
    output = fail(eu, 'setup', '--member', 'stranger')
    names = {'broker': 'the broker', 'region': "region 'us'", 'device': "device 'bob'"}
    assert f'is the database of {names.get(use, use)}: name a database of its own' in output


def test_setup_refuses_a_database_of_another_app(eu: Region, us: Region) -> None:
    for database in (us.broker.address.database, us.results.address.database):
        eu.options['regions']['eu'] = eu.server.couchdb_url(database)
        assert 'so it is used for something else' in fail(eu, 'setup', '--member', 'stranger')


def test_app_without_regions_is_told_so(eu: Region) -> None:
    eu.app.conf.broker_transport_options = {}
    assert 'this app has no regions' in fail(eu, 'status')


# -- status


def test_status_of_healthy_regions(eu: Region, us: Region) -> None:
    lead(eu)
    assert succeed(eu, 'status', '--check').splitlines()[-1] == 'leader: w1@eu'
    give(eu, age=10)
    give(eu, state='there', taken=eu.broker.clock.now() - 1000)
    give(us, to='eu')
    us.regions.put(returned(eu.broker.clock.now()))
    us.regions.put({'_id': 'region:us', 'type': 'Region', 'want': {'celery': 3}, 'errors': {}})
    output = succeed(eu, 'status', '--check')
    assert output.split()[:8] == ['FROM', 'TO', 'SENT', 'DELAYED', 'THERE', 'REFUSED', 'RESULTS', 'RESPONDS']
    outgoing, incoming = status(eu)
    assert [outgoing['source'], outgoing['target'], incoming['source'], incoming['target']] == ['eu', 'us', 'us', 'eu']
    assert numbers(eu) == {'sent': 1, 'delayed': 0, 'there': 1, 'withdrawn': 0, 'refused': 0, 'results': 0}
    assert outgoing['numbers']['sent']['oldest'] >= 10
    assert [incoming['numbers'][name]['count'] for name in ('sent', 'results')] == [1, 1]


def test_check_names_what_is_wrong(eu: Region, us: Region) -> None:
    assert "no worker leads in region eu: start a worker whose app has the option region = 'eu'" in fail(
        eu, 'status', '--check'
    )
    lead(eu)
    now = eu.broker.clock.now()
    give(eu, age=130)
    give(eu, delayed='exchange orders is unknown')
    give(eu, status='refused', reason='no', failed=now)
    give(us, to='eu', age=300)
    give(us, to='eu', delayed='queue q has no consumer')
    us.regions.put(returned(now - 60))
    output = fail(eu, 'status', '--check')
    for text in (
        'us has taken nothing for 2 m 1',
        'no worker leads there, or its workers have not been restarted since region eu was added',
        '1 task from eu for us cannot be moved now: exchange orders is unknown',
        'us has refused 1 task: see "couchdb regions tasks --state refused" in eu',
        'results wait in us for 1 m ',
        'eu has taken nothing for 5 m ',
        '1 task from us for eu cannot be moved now: queue q has no consumer',
        '6 problems found',
    ):
        assert text in output
    assert run(eu, 'regions', 'status').exit_code == 0


def test_check_names_one_cause_if_a_region_cannot_be_read(eu: Region, us: Region) -> None:
    lead(eu)
    give(eu, age=130)
    give(us, to='eu', age=300)
    us.regions.put(returned(eu.broker.clock.now() - 60))
    us.regions.put({'_id': 'region:us', 'type': 'Region', 'want': {}, 'errors': {'eu': 'wrong password'}})
    eu.regions.put({'_id': 'region:eu', 'type': 'Region', 'want': {}, 'errors': {'us': 'timed out'}})
    output = fail(eu, 'status', '--check')
    for text in (
        'the leader of region eu cannot read region us: timed out',
        'the leader of region us cannot read region eu: wrong password',
        '2 problems found',
    ):
        assert text in output


def test_malformed_documents_are_no_obstacle(eu: Region, us: Region) -> None:
    lead(eu)
    for site, to in ((eu, 'us'), (us, 'eu')):
        site.regions.bulk(
            [
                {'_id': f'p:{to}:a:1'},
                {'_id': f'p:{to}', 'state': ['there']},
                {'_id': f'p:{to}:b:1', 'published': -1e300, 'status': 7, 'id': 7, 'task': [], 'failed': 'x'},
                {'_id': f'p:{to}:c:1', 'cancelled': 'x', 'fallback_at': 'x', 'state': 'withdrawn', 'run_in': 7},
                {'_id': f'r:{to}:a:1', 'date': 'x'},
                {'_id': f'region:{site.name}', 'errors': 7, 'want': [1]},
            ]
        )
    expected = {'sent': 1, 'delayed': 0, 'there': 0, 'withdrawn': 1, 'refused': 1, 'results': 1}
    assert [{name: tally['count'] for name, tally in way['numbers'].items()} for way in status(eu)] == [expected] * 2
    assert len(succeed(eu, 'tasks', '--json').splitlines()) == 4


def test_region_that_does_not_respond_and_a_missing_database(eu: Region) -> None:
    lead(eu)
    eu.options['regions']['us'] = 'couchdb://127.0.0.1:1/regions'
    assert 'region us does not respond to this machine' in succeed(eu, 'setup')
    output = fail(eu, 'status', '--check')
    assert 'region us does not respond to this machine' in output
    assert '1 problem found' in output
    eu.regions.delete()
    for command in ('status', 'tasks'):
        assert 'the database does not exist; run "celery -A your_app couchdb regions setup"' in fail(eu, command)


def test_without_other_regions(eu: Region) -> None:
    del eu.options['regions']['us']
    assert 'There are no other regions.' in succeed(eu, 'status', '--check')


def test_a_removed_region_that_still_has_tasks(eu: Region) -> None:
    lead(eu)
    give(eu, 'a-task', to='old')
    assert 'the leader of region eu cannot read region old: it is not in the transport option regions' in fail(
        eu, 'status', '--check'
    )
    succeed(eu, 'drop', 'a-task', '--yes')
    succeed(eu, 'status', '--check')
    eu.regions.put({'_id': 'r:old:a-task:1', 'type': 'Returned', 'date': eu.broker.clock.now()})
    assert 'it is not in the transport option regions' in fail(eu, 'status', '--check'), 'a result for it'


# -- tasks


def test_tasks_are_listed_by_region_and_state(eu: Region) -> None:
    now = eu.broker.clock.now()
    ids = [str(uuid.uuid4()) for _ in range(4)]
    give(eu, ids[0], age=5)
    give(eu, ids[1], state='there', taken=now, cancelled=now)
    give(eu, ids[2], to='old', status='refused', reason='unknown task', failed=now)
    give(eu, ids[3], to='asia', state='withdrawn', run_in='eu')

    def listed(*given: str) -> set[str]:
        return {json.loads(line)['id'] for line in succeed(eu, 'tasks', '--json', *given).splitlines()}

    assert listed() == {*ids}
    assert listed('--region', 'us') == {*ids[:2]}
    assert listed('--state', 'refused', '--state', 'there') == {*ids[1:3]}
    lines = {line.split()[0]: line for line in succeed(eu, 'tasks').splitlines()}
    assert 'unknown task' in lines[ids[2]]
    assert 'cancelled' in lines[ids[1]]
    assert 'runs in eu' in lines[ids[3]]
    assert 'there are more' in succeed(eu, 'tasks', '-n', '2')


def test_a_task_is_shown_with_where_it_is(eu: Region) -> None:
    task_id = str(uuid.uuid4())
    assert where(task_id, eu.app) is None
    doc_id = give(eu, task_id, age=3)
    give(eu)
    assert where(task_id, eu.app) == {
        'region': 'us',
        'state': 'sent',
        'since': eu.regions.get(doc_id)['published'],
    }
    for name in (task_id, task_id[:13]):
        done = run(eu, 'show', name)
        assert (done.exit_code, 'sent to region us' in done.output) == (0, True), done.output
        assert 'shop.add' in done.output
        assert f'p:us:{task_id}' in succeed(eu, 'show', name)
    eu.regions.put(region.there(eu.regions.get(doc_id), '', eu.broker.clock.now()))
    assert json.loads(run(eu, 'show', task_id, '--json').output)['state'] == 'elsewhere'
    assert 'taken by region us ' in run(eu, 'show', task_id).output
    assert 'was given to another region, or it has ended' in fail(eu, 'show', str(uuid.uuid4()))


def test_an_id_is_found_among_many_that_begin_like_it(eu: Region) -> None:
    give(eu, 'order-1')
    for number in range(60):
        give(eu, f'order-1{number:02}')
    assert where('order-1', eu.app) is not None
    assert '1 to be cancelled.' in succeed(eu, 'cancel', 'order-1', '--yes')
    assert ['cancelled' in doc for doc in eu.records('us') if doc['id'] == 'order-1'] == [True]


def test_cancel_marks_what_has_not_ended(eu: Region) -> None:
    running, refused = str(uuid.uuid4()), str(uuid.uuid4())
    doc_id = give(eu, running, state='there', taken=1.0)
    give(eu, refused, status='refused', reason='no', failed=1.0)
    assert '1 to be cancelled.' in succeed(eu, 'cancel', running[:13], '--yes')
    doc = eu.regions.get(doc_id)
    assert (doc['cancelled'] > 1, 'terminate' in doc) == (True, False)
    succeed(eu, 'cancel', running, '--terminate', '--yes')
    assert eu.regions.get(doc_id) == {**doc, '_rev': eu.regions.get(doc_id)['_rev'], 'terminate': True}
    assert 'has refused it' in fail(eu, 'cancel', refused, '--yes')
    give(eu, withdrawn := str(uuid.uuid4()), state='withdrawn', run_in='asia')
    assert 'does not run in region us any more, but in asia' in fail(eu, 'cancel', withdrawn, '--yes')
    step = str(uuid.uuid4())
    assert records.cancel(eu.regions, step) == (0, {})
    assert "'asia' is not another one" in fail(eu, 'cancel', step, '--region', 'asia', '--yes')
    assert '1 to be cancelled.' in succeed(eu, 'cancel', step, '--region', 'us', '--yes')
    [doc] = records.of_task(eu.regions, step)
    assert (region.region_of(doc['_id']), 'cancelled' in doc, 'message' in doc) == ('us', True, False)


def test_a_cancelled_task_ends_as_revoked(regions: Regions, eu: Region, us: Region) -> None:
    tasks = [eu.app.send_task('shop.add', region='us') for _ in range(2)]
    regions.work('us')
    assert us.tasks() == sorted(task.id for task in tasks)
    cancelled, other = tasks
    succeed(eu, 'cancel', cancelled.id, '--yes')
    regions.work()
    regions.work()
    assert us.tasks() == [other.id]
    assert cancelled.state == 'REVOKED'
    assert [json.loads(line)['id'] for line in succeed(eu, 'tasks', '--json').splitlines()] == [other.id]


def test_change_of_a_record_that_others_change(eu: Region) -> None:
    doc_id, gone = give(eu), give(eu)
    docs = [doc for doc in eu.regions.fetch([doc_id, gone]) if doc]
    eu.regions.put(region.there(docs[0], '', 7.0))
    eu.regions.request('DELETE', f'/{gone}', {'rev': docs[1]['_rev']})
    assert records.Records(eu.regions).cancel(docs) == (
        1,
        {gone: 'it was changed or deleted by somebody else just now'},
    )
    doc = eu.regions.get(doc_id)
    assert (doc['taken'], 'cancelled' in doc) == (7.0, True)


def test_replay_and_drop(eu: Region) -> None:
    first, other, sent = (str(uuid.uuid4()) for _ in range(3))
    refused: dict[str, Any] = {'status': 'refused', 'reason': 'unknown', 'failed': 1.0, 'state': 'there', 'taken': 1.0}
    doc_ids = [give(eu, first, **refused), give(eu, other, **refused)]
    assert 'it was not refused' in fail(eu, 'replay', give(eu, sent), '--yes')
    assert '1 replayed.' in succeed(eu, 'replay', first, '--yes')
    doc = eu.regions.get(doc_ids[0])
    assert region.state_of(doc) == 'sent'
    assert not doc.keys() & refused.keys()
    assert '1 replayed.' in succeed(eu, 'replay', '--all', '--yes')
    assert region.state_of(eu.regions.get(doc_ids[1])) == 'sent'
    assert '2 dropped.' in succeed(eu, 'drop', first, sent, '--yes')
    assert numbers(eu)['sent'] == 1
    assert run(eu, 'regions', 'replay').exit_code == 2


def test_more_records_than_one_request_reads(eu: Region) -> None:
    docs = [
        {'_id': region.record_id('us', f'{n:05}', 't'), 'id': f'{n:05}', 'task': 'add', 'status': 'refused'}
        for n in range(450)
    ]
    eu.regions.bulk(docs)
    assert numbers(eu)['refused'] == 450
    assert '450 replayed.' in succeed(eu, 'replay', '--all', '--yes')
    assert 'several ids begin with' in fail(eu, 'show', '0012')


# -- vacuum


def test_vacuum_keeps_the_tombstones_of_messages_that_have_a_record_elsewhere(
    eu: Region, us: Region, apache_couchdb: bool
) -> None:
    if not apache_couchdb:
        pytest.skip('the embedded server has no tombstones')
    eu.options.update(visibility_timeout=0.5, request_timeout=0.4, connect_timeout=0.4)
    records = [give(us, to='eu'), give(eu, state='withdrawn', run_in='eu')]
    kept = [moved_id(region.SOURCE, doc_id) for doc_id in records]
    moved = [*kept, moved_id(region.SOURCE, 'p:eu:ended:1')]
    record = give(eu)
    for client, ids in ((eu.broker, moved), (eu.regions, [record])):
        for doc_id in ids:
            rev = eu.regions.get(doc_id)['_rev'] if client is eu.regions else client.put({'_id': doc_id})
            client.request('DELETE', f'/{doc_id}', {'rev': rev})
    done = run(eu, 'vacuum', '--yes', '--age', '0.6')
    assert done.exit_code == 0, done.output
    assert eu.broker.known(moved) == {*kept}
    assert words(succeed(eu, 'setup')) == ['ok', 'ok']  # the vacuum has left its marks there
