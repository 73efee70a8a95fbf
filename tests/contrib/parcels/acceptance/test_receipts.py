"""Receipts say how tasks end, whatever ends them: with a result, without one, and in which process of the worker."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kombu_couchdb.couchdb.client import Client
from tests.acceptance.conftest import Site
from tests.acceptance.test_endings import APP
from tests.conftest import PATIENT_BROKER, wait_for
from tests.parcels import receipt_of
from tests.worker_process import WorkerProcess

#: The state and a part of the text of each end, and the parcel.
ENDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    'success': ('SUCCESS', '', {'task': 'succeed'}),
    'exception': ('FAILURE', 'ValueError: no', {'task': 'raise', 'args': ['no']}),
    'exception of 1 MB': ('FAILURE', 'ValueError: ', {'task': 'huge'}),
    'ignored': ('IGNORED', 'ignores it', {'task': 'ignore'}),
    'retried': ('SUCCESS', '', {'task': 'retry', 'args': [2]}),
    'no retry left': ('FAILURE', 'KeyError: retried', {'task': 'retry', 'args': [9]}),
    'expired': ('REVOKED', 'TaskRevokedError: expired', {'task': 'succeed', 'expires': 1}),
    'time limit': ('FAILURE', 'TimeLimitExceeded: ', {'task': 'hard_limit'}),
    'process lost': ('FAILURE', 'WorkerLostError: ', {'task': 'lost'}),
}


@pytest.mark.parametrize('settings', [{}, {'task_acks_late': True, 'task_ignore_result': True}], ids=str)
def test_each_end_is_in_the_receipt(site: Site, parcels: Client, settings: dict[str, Any]) -> None:
    parcels.bulk([{'_id': name, **doc} for name, (_, _, doc) in ENDS.items()])
    options = {**PATIENT_BROKER, 'parcels': parcels.address.database, 'parcels_accept': ['*']}
    command = WorkerProcess.command('--pool', 'prefork', '--concurrency', '2')
    site.run(
        command, {**site.environment, 'SETTINGS': json.dumps({**settings, 'broker_transport_options': options})}, APP
    )
    for name, (state, text, _) in ENDS.items():
        receipt = wait_for(lambda name=name: receipt_of(parcels, name), f'the receipt {name}')  # type: ignore[misc]
        assert receipt['state'] == state, name
        assert text in str(receipt.get('error') or receipt.get('left_out') or ''), name
