"""`celery couchdb regions`: replications are set up, watched and restarted."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from click.testing import Result

from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.client import Client
from tests.conftest import PATIENCE, Users, wait_for
from tests.regions import Region, Regions, regions_on
from tests.support import command_of


@pytest.fixture
def settings(server: Server, apache_couchdb: bool) -> Iterator[list[str]]:
    """The URLs of the settings of each node's replicator: none are set in the test, and as before after it."""
    if not apache_couchdb:
        pytest.skip('the embedded server has no replicator that reaches other servers')
    nodes = requests.get(f'{server.url}/_membership', timeout=PATIENCE).json()['cluster_nodes']
    urls = [f'{server.url}/_node/{node}/_config/replicator' for node in nodes]
    before = [requests.get(url, timeout=PATIENCE).json() for url in urls]
    for url in urls:
        forget(url)
    yield urls
    for url, given in zip(urls, before, strict=True):
        forget(url)
        for name, value in given.items():
            requests.put(f'{url}/{name}', json=value, timeout=PATIENCE)


def forget(url: str) -> None:
    """Delete the settings of the replicator on one node."""
    for name in requests.get(url, timeout=PATIENCE).json():
        requests.delete(f'{url}/{name}', timeout=PATIENCE)


@pytest.fixture
def regions(server: Server, settings: list[str]) -> Iterator[Regions]:
    """Two regions, with names of their own, because all tests share the database `_replicator`."""
    tag = uuid.uuid4().hex[:8]
    with regions_on(server, f'eu-{tag}', f'us-{tag}') as regions:
        yield regions
        for region in regions.all:
            for doc in stored(region):
                path = f'{server.url}/_replicator/{doc["_id"]}'
                requests.delete(path, params={'rev': doc['_rev']}, timeout=PATIENCE)


def stored(region: Region) -> list[dict[str, Any]]:
    """Return the replications of a region."""
    found = requests.get(f'{region.server.url}/_replicator/_all_docs?include_docs=true', timeout=PATIENCE).json()
    mine = re.compile(f'celery-(regions|results)-{region.name}-from-')
    return [row['doc'] for row in found['rows'] if mine.match(row['id'])]


def run(region: Region, *given: str) -> Result:
    """Run a command in a region; its output contains no password."""
    done = command_of(region.app)('regions', *given)
    assert f':{region.server.password}@' not in done.output
    return done


def succeeded(done: Result) -> str:
    assert done.exit_code == 0, done.output
    return done.output


def words(output: str) -> list[str]:
    """Return what happened to each step: `done`, `ok`, `note` or `not yet`."""
    return [line[2:9].strip() for line in output.splitlines() if line.startswith('  ')]


def status(region: Region) -> dict[str, Any]:
    [line] = succeeded(run(region, 'status', '--json')).splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def state(region: Region) -> str:
    return str(status(region)['local']['replications']['regions']['state'])


def test_setup_writes_replications_and_a_second_one_changes_nothing(regions: Regions) -> None:
    eu, us = regions.all
    assert 'not yet' in words(succeeded(run(eu, 'setup', '--dry-run')))
    assert stored(eu) == []
    assert 'done' in words(succeeded(run(eu, 'setup')))
    first = stored(eu)
    assert [doc['_id'] for doc in first] == [
        f'celery-{kind}-{eu.name}-from-{us.name}' for kind in ('regions', 'results')
    ]
    assert set(words(succeeded(run(eu, 'setup')))) <= {'ok', 'note'}
    assert stored(eu) == first


def test_a_parcel_travels_and_its_deletion_returns(regions: Regions) -> None:
    eu, us = regions.all
    for region in regions.all:
        succeeded(run(region, 'setup'))
    us.regions.put({'_id': (doc_id := f'p:{eu.name}:{us.name}:1'), 'type': 'Parcel', 'published': 1.0})
    us.regions.put({'_id': f'p:asia:{us.name}:1', 'type': 'Parcel', 'published': 1.0})
    wait_for(lambda: eu.regions.get_or_none(doc_id), 'the parcel to arrive')
    assert status(us)['local']['leaving'] == {'count': 1, 'oldest': pytest.approx(eu.regions.clock.now(), rel=0.1)}
    assert status(eu)['local']['arrived']['count'] == status(eu)['remote']['leaving']['count'] == 1
    eu.regions.request('DELETE', f'/{doc_id}', {'rev': eu.regions.get(doc_id)['_rev']})
    wait_for(lambda: us.regions.get_or_none(doc_id) is None, 'the deletion to return')
    assert eu.regions.get_or_none(f'p:asia:{us.name}:1') is None
    wait_for(lambda: status(eu)['remote']['pending'] == 0, 'the replication to look at all changes')
    wait_for(lambda: status(eu)['local']['replications']['results']['state'] == 'running', 'that of results to start')


def test_changed_password_is_written_and_a_removed_region_is_removed(regions: Regions, users: Users) -> None:
    eu, us = regions.all
    succeeded(run(eu, 'setup'))
    user = f'peer-{uuid.uuid4().hex[:8]}'
    users(user, 'first')
    eu.options['regions'][us.name] = eu.server.couchdb_url(us.regions.address.database, user, 'first')
    assert 'region is not set up' not in succeeded(run(eu, 'setup'))
    assert {doc['source']['auth']['basic']['username'] for doc in stored(eu)} == {user}
    users(user, 'second')
    eu.options['regions'][us.name] = eu.server.couchdb_url(us.regions.address.database, user, 'second')
    succeeded(run(eu, 'setup'))
    assert {doc['source']['auth']['basic']['password'] for doc in stored(eu)} == {'second'}
    del eu.options['regions'][us.name]
    assert 'of a region that is not in the option regions, is removed' in succeeded(run(eu, 'setup'))
    assert stored(eu) == []
    assert 'There are no other regions.' in succeeded(run(eu, 'status'))


def test_a_renamed_region_has_two_names_for_a_while(regions: Regions) -> None:
    eu, us = regions.all
    new = f'new-{us.name[3:]}'
    eu.options['regions'][new] = eu.options['regions'][us.name]
    succeeded(run(eu, 'setup'))

    def states() -> set[Any]:
        found = [json.loads(line) for line in succeeded(run(eu, 'status', '--json')).splitlines()]
        return {one['state'] for region in found for one in region['local']['replications'].values()}

    def started() -> bool:
        return not states() & {'initializing', 'starting'}

    wait_for(started, 'CouchDB to start the replications')
    assert states() == {'running'}
    del eu.options['regions'][us.name]
    succeeded(run(eu, 'setup'))
    assert [doc['_id'] for doc in stored(eu)] == [
        f'celery-{kind}-{eu.name}-from-{new}' for kind in ('regions', 'results')
    ]
    wait_for(started, 'CouchDB to start the replications')
    assert states() == {'running'}


def test_wrong_password_changes_nothing(regions: Regions) -> None:
    eu, us = regions.all
    eu.options['regions'][us.name] = eu.server.couchdb_url(us.regions.address.database, f'no-{us.name}', 'hidden')
    done = run(eu, 'setup')
    assert done.exit_code == 1
    assert f"refused user 'no-{us.name}'" in done.output
    assert 'hidden' not in done.output
    assert stored(eu) == []


def test_replications_of_another_app_are_not_replaced(regions: Regions) -> None:
    eu, us = regions.all
    succeeded(run(eu, 'setup'))
    before = stored(eu)
    eu.options['regions'][eu.name] = eu.server.couchdb_url(f'{us.regions.address.database}-other')
    done = run(eu, 'setup')
    assert done.exit_code == 1
    assert 'choose another name for the region' in done.output
    assert stored(eu) == before
    del eu.options['regions'][us.name]  # nor removed, like those of a region that is not in the option
    output = succeeded(run(eu, 'setup', '--dry-run'))
    assert f'celery-results-{eu.name}-from-{us.name}, of a region' in output  # the apps share the database of results
    assert f'celery-regions-{eu.name}-from-{us.name}, of a region' not in output


def test_region_that_does_not_respond(regions: Regions) -> None:
    eu, us = regions.all
    eu.options['regions'][us.name] = f'couchdb://127.0.0.1:1/{us.regions.address.database}'
    assert f'region {us.name} does not respond to this machine' in succeeded(run(eu, 'setup'))
    wait_for(lambda: state(eu) == 'crashing', 'the replication to fail')
    output = succeeded(run(eu, 'status'))
    assert f'{us.name}: the replication of parcels is crashing since ' in output
    assert 'refused' in output
    assert run(eu, 'status', '--check').exit_code == 1


def test_nudge_tries_a_failed_replication_at_once(regions: Regions) -> None:
    eu, us = regions.all
    us.regions.delete()
    succeeded(run(eu, 'setup'))
    wait_for(lambda: state(eu) == 'crashing', 'the replication to fail')
    us.regions.create()
    us.regions.put({'_id': (doc_id := f'p:{eu.name}:{us.name}:1'), 'type': 'Parcel'})
    assert f'celery-regions-{eu.name}-from-{us.name} starts again' in succeeded(run(eu, 'nudge', us.name))
    wait_for(lambda: eu.regions.get_or_none(doc_id), 'the parcel to arrive')
    # A replication that was tried again after a wait still counts its failures.
    path = f'{eu.server.url}/_scheduler/docs/_replicator/celery-regions-{eu.name}-from-{us.name}'
    assert requests.get(path, timeout=PATIENCE).json()['error_count'] == 0


def test_missing_database_is_named_with_what_to_do(regions: Regions) -> None:
    [eu, _] = regions.all
    eu.regions.delete()
    done = run(eu, 'status')
    assert done.exit_code == 1
    assert 'the database does not exist; run "celery -A your_app couchdb regions setup"' in done.output


def test_unknown_region_and_missing_replications(regions: Regions) -> None:
    eu, us = regions.all
    for name, text in (('mars', "Region 'mars' is unknown"), (eu.name, 'is the region of this app')):
        done = run(eu, 'nudge', name)
        assert (done.exit_code, text in done.output) == (2, True), done.output
    done = run(eu, 'nudge')
    assert done.exit_code == 1
    assert f'has no replications from region {us.name}' in done.output
    assert 'a replication is missing: run "celery -A your_app couchdb regions setup"' in succeeded(run(eu, 'status'))


def test_member_sees_parcels_but_not_the_state_of_replications(
    regions: Regions, users: Users, member: dict[str, str]
) -> None:
    [eu, _] = regions.all
    succeeded(run(eu, 'setup', '--member', member['user']))
    url = eu.server.couchdb_url(eu.broker.address.database, member['user'], member['password'])
    eu.app.conf.broker_url = url
    found = status(eu)
    assert found['local']['replications']['regions']['state'] is None
    assert 'name one with --admin' in succeeded(run(eu, 'status'))
    for given in (['setup'], ['nudge']):
        done = run(eu, *given)
        assert done.exit_code == 1
        assert 'name an administrator of CouchDB with --admin' in done.output


def given(settings: list[str], name: str) -> set[Any]:
    """Return the values of a setting on all nodes."""
    return {requests.get(url, timeout=PATIENCE).json().get(name) for url in settings}


def test_setup_bounds_the_waits_of_the_replicator(regions: Regions, settings: list[str]) -> None:
    [eu, _] = regions.all
    succeeded(run(eu, 'setup'))
    assert (given(settings, 'max_history'), given(settings, 'interval')) == ({'2'}, {'5000'})
    requests.put(f'{settings[0]}/max_history', json='5', timeout=PATIENCE)
    assert 'stays so; with 2, regions that were cut off catch up' in succeeded(run(eu, 'setup'))
    assert '5' in given(settings, 'max_history')


def test_setup_explains_that_replication_is_switched_off(regions: Regions, settings: list[str]) -> None:
    [eu, _] = regions.all
    requests.put(f'{settings[0]}/valid_endpoint_protocols', json='none', timeout=PATIENCE)
    done = run(eu, 'setup')
    assert done.exit_code == 1
    assert 'replication is switched off, by the setting "[replicator] valid_endpoint_protocols"' in done.output


def test_certificates_are_verified(regions: Regions, settings: list[str]) -> None:
    eu, us = regions.all
    eu.options['regions'][us.name] = f'couchdbs://127.0.0.1:1/{us.regions.address.database}'
    done = run(eu, 'setup')
    assert done.exit_code == 1
    assert 'name the file on its machines with --trusted-certificates' in done.output
    assert stored(eu) == []
    succeeded(run(eu, 'setup', '--trusted-certificates', '/etc/ssl/certs/ca-certificates.crt'))
    assert given(settings, 'verify_ssl_certificates') == {'true'}
    assert given(settings, 'ssl_trusted_certificates_file') == {'/etc/ssl/certs/ca-certificates.crt'}
    assert {doc['source']['url'].partition(':')[0] for doc in stored(eu)} == {'https'}


def test_vacuum_leaves_out_the_database_of_regions(regions: Regions) -> None:
    [eu, _] = regions.all
    eu.options.update(visibility_timeout=0.5, request_timeout=0.4, connect_timeout=0.4)
    doc_id = f'p:{eu.name}:other:1'
    rev = eu.regions.put({'_id': doc_id})
    eu.regions.request('DELETE', f'/{doc_id}', {'rev': rev})
    done = succeeded(command_of(eu.app)('vacuum', '--yes', '--age', '0.6'))
    assert f'{eu.regions.address.database}: left out, because parcels could come back' in done
    assert done.count(eu.regions.address.database) == 1
    assert eu.regions.info()['doc_del_count'] == 1


def test_app_without_regions_and_the_embedded_server_are_told_so(
    server: Server, apache_couchdb: bool, client: Client
) -> None:
    with regions_on(server, 'eu', 'us') as regions:
        [eu, _] = regions.all
        if not apache_couchdb:
            done = run(eu, 'setup')
            assert done.exit_code == 1
            assert 'regions need Apache CouchDB' in done.output
            assert 'a replication is missing' in succeeded(run(eu, 'status'))
        eu.app.conf.broker_transport_options = {}
        done = run(eu, 'status')
        assert done.exit_code == 1
        assert 'this app has no regions' in done.output


def test_check_fails_while_a_parcel_is_missing(regions: Regions, users: Users, member: dict[str, str]) -> None:
    eu, us = regions.all
    succeeded(run(eu, 'setup', '--member', member['user']))
    wait_for(lambda: run(eu, 'status', '--check').exit_code == 0, 'the check to pass')
    requests.delete(
        f'{eu.server.url}/_replicator/{stored(eu)[0]["_id"]}', params={'rev': stored(eu)[0]['_rev']}, timeout=PATIENCE
    )
    us.regions.put({'_id': (doc_id := f'p:{eu.name}:{us.name}:1'), 'type': 'Parcel', 'published': 1.0})
    # A member of the databases cannot see that the replication is missing.
    url = eu.server.couchdb_url(eu.broker.address.database, member['user'], member['password'])
    eu.app.conf.broker_url = url
    done = run(eu, 'status', '--check')
    assert done.exit_code == 1
    assert f'{us.name}: 1 parcels from there are not here' in done.output
    eu.regions.put({'_id': doc_id})
    succeeded(run(eu, 'status', '--check'))


def test_node_of_a_cluster_is_one_that_responds(regions: Regions) -> None:
    eu, us = regions.all
    database = us.regions.address.database
    down, up = f'couchdb://127.0.0.1:1/{database}', us.server.couchdb_url(database)
    eu.options['regions'][us.name] = down
    succeeded(run(eu, 'setup'))
    eu.options['regions'][us.name] = up
    assert f'pulls from http://127.0.0.1:1/{database}' in succeeded(run(eu, 'nudge'))  # only setup changes a single URL
    eu.options['regions'][us.name] = f'{down};{up}'
    done = run(eu, 'status', '--check')
    assert done.exit_code == 1
    assert f'{us.name}: CouchDB pulls from http://127.0.0.1:1/{database}, which does not respond' in done.output
    server = us.regions.address.server
    assert f'starts again, and pulls from {server}/{database}' in succeeded(run(eu, 'nudge'))
    parcels, results = stored(eu)
    assert parcels['source']['url'] == f'{server}/{database}'
    assert results['source']['url'] == f'{server}/{eu.results.address.database}'
    assert results['source']['headers'] == {'X-Celery-Region': us.name}
    assert set(words(succeeded(run(eu, 'setup')))) <= {'ok', 'note'}
    wait_for(lambda: run(eu, 'status', '--check').exit_code == 0, 'the check to pass')
    output = succeeded(run(eu, 'status'))
    assert f'{us.name}: CouchDB pulls from {server}/{database}\n' in output
