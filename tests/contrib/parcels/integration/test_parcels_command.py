"""`celery couchdb parcels`: what waits, what was refused, and what became of the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery import Celery

from kombu_couchdb.contrib.parcels import parcel
from kombu_couchdb.contrib.parcels.stored_parcels import Parcels
from kombu_couchdb.couchdb.client import Client
from tests.integration.conftest import Run
from tests.support import command_of


@pytest.fixture
def run(mover_app: Celery) -> Run:
    return command_of(mover_app)


@pytest.fixture
def docs(parcels: Client) -> None:
    """A parcel that was moved, two that were refused, and one that waits."""
    add: dict[str, Any] = {'task': 'add', 'args': [1, 2]}
    mail: dict[str, Any] = {'_id': 'refused-1', 'task': 'mail', 'args': ['\x1b[2J']}
    parcels.bulk(
        [
            parcel.receipt_of({**add, '_id': 'moved'}, 'a', None, 5.0, 60.0),
            parcel.refused(mail, "task 'mail' is not in parcels_accept", 5.0),
            parcel.refused({**add, '_id': 'refused-2'}, 'mistake', 6.0),
            {**add, '_id': 'waiting'},
            {'_id': 'note', 'type': 'Note', 'status': 'refused'},
        ]
    )


def listed(run: Run, *arguments: str) -> dict[str, str]:
    """Return the ids of the listed parcels, with their states."""
    done = run('parcels', 'list', '--json', *arguments)
    assert done.exit_code == 0, done.output
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    return {line['document']['_id']: line['state'] for line in lines}


def test_list(run: Run, docs: None) -> None:
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


def test_show(run: Run, docs: None) -> None:
    lines = run('parcels', 'show', 'refused-1').stdout.splitlines()
    assert {'state of the parcel refused', 'task       mail', r'args       ["\u001b[2J"]'} <= set(lines)
    assert json.loads(run('parcels', 'show', 'mov', '--json').stdout)['state'] == 'moved'


@pytest.mark.parametrize(
    ('given', 'error'),
    [
        (['show', 'refused'], "several ids begin with 'refused': refused-1, refused-2"),
        (['show', 'nothing'], "there is no parcel 'nothing'"),
        (['drop', '_design/parcels-v2', '--yes'], "there is no parcel '_design/parcels-v2'"),
        (['drop'], 'Name parcels by id, or give --all for all refused ones.'),
        (['replay', 'moved', '--all'], 'Name parcels by id, or give --all for all refused ones.'),
    ],
)
def test_errors(run: Run, docs: None, given: list[str], error: str) -> None:
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


def test_replay(run: Run, docs: None) -> None:
    assert run('parcels', 'replay', 'refused-1', answer='y').exit_code == 0
    assert listed(run) == {'refused-1': 'waiting', 'waiting': 'waiting', 'refused-2': 'refused', 'moved': 'moved'}
    done = run('parcels', 'replay', 'moved', '--yes')
    assert (done.exit_code, done.stderr) == (1, 'moved: it was not refused\n')
    assert run('parcels', 'replay', '--all', '--yes').stdout == '1 replayed.\n'
    assert listed(run)['refused-2'] == 'waiting'


def test_parcel_that_has_lost_its_call_is_not_replayed(run: Run, parcels: Client) -> None:
    """With the reason it was too large for CouchDB."""
    parcels.put(parcel.shortened(parcel.refused({'_id': 'large', 'task': 'add'}, 'mistake', 5.0)))
    done = run('parcels', 'replay', 'large', '--yes')
    assert (done.exit_code, done.stderr) == (1, 'large: it cannot be read\n')
    assert listed(run) == {'large': 'refused'}


def test_drop(run: Run, docs: None, parcels: Client) -> None:
    assert run('parcels', 'drop', '--all', answer='n').exit_code == 1
    assert len(listed(run)) == 4
    assert run('parcels', 'drop', '--all', '--yes').stdout == '2 dropped.\n'
    assert listed(run) == {'waiting': 'waiting', 'moved': 'moved'}
    leaf = {'_id': 'waiting', '_rev': f'1-{"0" * 32}', 'task': 'add', 'args': [5, 6]}
    parcels.request('POST', '/_bulk_docs', body={'docs': [leaf], 'new_edits': False})
    assert run('parcels', 'drop', 'waiting', 'moved', '--yes').stdout == '2 dropped.\n'
    assert listed(run) == {}
    assert all(leaf.get('_deleted') for leaf in parcels.leaves('waiting'))


def test_many_parcels(run: Run, parcels: Client) -> None:
    """More than one request reads."""
    names = [f'{n:04}' for n in range(1_050)]
    parcels.bulk([parcel.refused({'_id': name, 'task': 'add'}, 'mistake', 5.0) for name in names])
    done = run('parcels', 'list', '--json', '--limit', '9999')
    assert [json.loads(line)['document']['_id'] for line in done.stdout.splitlines()] == names
    assert run('parcels', 'drop', '--all', '--yes').stdout == '1,050 dropped.\n'
    assert listed(run, *(f'--state={state}' for state in Parcels.states)) == {}
