"""`celery couchdb parcels`: what waits, what was refused, and what became of the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_couchdb.parcels.mover import Mover
from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.client import Client
from tests.regions import regions_on
from tests.support import command_of, items

from .conftest import Run


@pytest.fixture
def run(mover_app: Celery) -> Run:
    return command_of(mover_app)


@pytest.fixture
def moved(parcels: Client, mover: Callable[[], Mover]) -> Mover:
    """A mover that has moved one parcel and refused two; one more waits."""
    one = mover()
    parcels.bulk(
        [
            {'_id': 'moved', 'task': 'add', 'args': [1, 2]},
            {'_id': 'refused-1', 'task': 'mail', 'args': ['\x1b[2J']},
            {'_id': 'refused-2', 'task': 'add', 'args': 5},
        ]
    )
    one.step()
    parcels.put({'_id': 'waiting', 'task': 'add', 'args': [3, 4]})
    return one


def listed(run: Run, *arguments: str, between: str = '') -> dict[str, str]:
    """Return the ids of the listed parcels, with their states."""
    done = run('parcels', *filter(None, [between]), 'list', '--json', *arguments)
    assert done.exit_code == 0, done.output
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    return {line['document']['_id']: line['state'] for line in lines}


def test_parcels_between_regions(server: Server) -> None:
    """The commands of the region that refused a parcel."""
    with regions_on(server, 'eu', 'us') as regions:
        eu, run = regions['eu'], command_of(regions['eu'].app)
        eu.regions.bulk([{'_id': 'p:eu:us:1', 'status': 'fail', 'reason': 'mistake', 'type': 'Parcel', 'task': 'add'}])
        regions['us'].app.send_task('add', (1, 2), region='eu')
        regions.replicate()
        states = {line.split()[2] for line in run('parcels', '--regions', 'list').stdout.splitlines()[1:]}
        assert states == {'waiting', 'refused'}
        assert run('parcels', '--regions', 'replay', '--all', '--yes').stdout == '1 replayed.\n'
        assert set(listed(run, between='--regions').values()) == {'waiting'}
        assert run('parcels', '--regions', 'drop', 'p:eu:us:1', '--yes').stdout == '1 dropped.\n'
        assert len(listed(run, between='--regions')) == 1


def test_parcels_of_an_app_without_regions(run: Run) -> None:
    done = run('parcels', '--regions', 'list')
    assert (done.exit_code, done.stderr.strip()) == (
        1,
        'Error: this app has no regions: set the transport options region and regions (broker_transport_options)',
    )


def test_list(run: Run, moved: Mover) -> None:
    assert listed(run) == {'waiting': 'waiting', 'refused-1': 'refused', 'refused-2': 'refused', 'moved': 'moved'}
    assert listed(run, '--state', 'moved', '--state', 'waiting') == {'waiting': 'waiting', 'moved': 'moved'}
    done = run('parcels', 'list', '--limit', '3')
    assert [line.split()[:3] for line in done.stdout.splitlines()[1:]] == [
        ['waiting', 'add', 'waiting'],
        ['refused-1', 'mail', 'refused'],
        ['refused-2', 'add', 'refused'],
    ]
    assert "task 'mail' is not in parcels_accept" in done.stdout
    assert done.stderr == 'These are the first 3; there are more (--limit).\n'


def test_empty_list(run: Run, parcels: Client) -> None:
    assert run('parcels', 'list').stdout == 'There are no parcels.\n'


def test_show(run: Run, moved: Mover) -> None:
    lines = run('parcels', 'show', 'refused-1').stdout.splitlines()
    assert {'state of the parcel refused', 'task       mail', r'args       ["\u001b[2J"]'} <= set(lines)
    assert json.loads(run('parcels', 'show', 'mov', '--json').stdout)['state'] == 'moved'


@pytest.mark.parametrize(
    ('given', 'error'),
    [
        (['show', 'refused'], "several ids begin with 'refused': refused-1, refused-2"),
        (['show', 'nothing'], "there is no parcel 'nothing'"),
        (['drop', '_design/parcels-v1', '--yes'], "there is no parcel '_design/parcels-v1'"),
        (['drop'], 'Name parcels by id, or give --all for all refused ones.'),
        (['replay', 'moved', '--all'], 'Name parcels by id, or give --all for all refused ones.'),
    ],
)
def test_errors(run: Run, moved: Mover, given: list[str], error: str) -> None:
    done = run('parcels', *given)
    assert done.exit_code
    assert done.stderr.endswith(f'Error: {error}\n')


def test_app_without_parcels(run: Run, mover_app: Celery) -> None:
    del mover_app.conf.broker_transport_options['parcels']
    done = run('parcels', 'list')
    assert (done.exit_code, done.stderr) == (
        1,
        'Error: the app has no database of parcels: set the transport option parcels to its name\n',
    )


def test_replay_after_the_list_was_extended(
    run: Run, moved: Mover, mover: Callable[[], Mover], mover_app: Celery, client: Client
) -> None:
    moved._leader.release()
    mover_app.conf.broker_transport_options['parcels_accept'] = ['add', 'mail']
    assert run('parcels', 'replay', 'refused-1', answer='y').exit_code == 0
    mover().step()
    assert listed(run) == {'refused-2': 'refused', 'moved': 'moved', 'refused-1': 'moved', 'waiting': 'moved'}
    assert len(items(client)) == 3
    done = run('parcels', 'replay', 'moved', '--yes')
    assert (done.exit_code, done.stderr) == (1, 'moved: it was not refused\n')
    assert run('parcels', 'replay', '--all', '--yes').stdout == '1 replayed.\n'
    assert listed(run)['refused-2'] == 'waiting'


def test_drop(run: Run, moved: Mover, parcels: Client, client: Client) -> None:
    assert run('parcels', 'drop', '--all', answer='n').exit_code == 1
    assert len(listed(run)) == 4
    assert run('parcels', 'drop', '--all', '--yes').stdout == '2 dropped.\n'
    assert listed(run) == {'waiting': 'waiting', 'moved': 'moved'}
    leaf = {'_id': 'waiting', '_rev': f'1-{"0" * 32}', 'task': 'add', 'args': [5, 6]}
    parcels.request('POST', '/_bulk_docs', body={'docs': [leaf], 'new_edits': False})
    assert run('parcels', 'drop', 'waiting', 'moved', '--yes').stdout == '2 dropped.\n'
    moved._stale = True
    moved.step()
    assert listed(run) == {}
    assert len(items(client)) == 1
