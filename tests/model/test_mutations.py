"""The machine can fail: of each of these faults, put into the product, it finds what it does to somebody."""

from __future__ import annotations

import inspect
import os
import textwrap
from types import FunctionType
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kombu_couchdb.consumer.heartbeat import Heartbeat
from kombu_couchdb.consumer.unacked import Unacked
from kombu_couchdb.leases.sweeper import Sweeper
from kombu_couchdb.leases.watch import Watch

from .machine import Cluster, Protocol, Single

#: The most examples that are tried.
MOST = 300


class Fault(NamedTuple):
    """`good` in the source of `function` of `owner` is replaced by `bad`."""

    name: str
    machine: type[Protocol]
    owner: Any
    function: str
    good: str
    bad: str


FAULTS = [
    Fault(
        'the heartbeat of a dead consumer is not deleted',
        Single,
        Sweeper,
        '_delete_heartbeats',
        'self._store.client.bulk([deletion(doc) for doc in docs])',
        "[type('', (), {'is_proven': True}) for doc in docs]",
    ),
    Fault(
        'whoever lost its lease keeps what it held', Single, Heartbeat, '_begin_anew', 'self._unacked.drop_all()', '0'
    ),
    Fault(
        'messages are handed over after the lease has ended',
        Single,
        Unacked,
        'hand_over',
        'or not self._lease.valid',
        '',
    ),
    Fault(
        'the sweep trusts the wall clock',
        Single,
        Watch,
        'silent',
        'self._looked - seen.since > seen.lease + GRACE_SECONDS',
        'seen.expires + GRACE_SECONDS < self._clock.now()',
    ),
    Fault(
        'silence counts while the server is away',
        Single,
        Watch,
        'interrupted',
        'min(now, seen.since + seconds)',
        'seen.since',
    ),
    Fault(
        'an unproven heartbeat is a heartbeat',
        Cluster,
        Heartbeat,
        '_beaten',
        'proven = result.is_proven',
        'proven = True',
    ),
]


def put_in(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    function: FunctionType = inspect.getattr_static(fault.owner, fault.function)
    source = textwrap.dedent(inspect.getsource(function))
    assert fault.good in source, f'{fault.function} has changed: mend the fault {fault.name!r}'
    found: dict[str, Any] = {}
    exec(
        compile('from __future__ import annotations\n' + source.replace(fault.good, fault.bad), fault.name, 'exec'),
        function.__globals__,
        found,
    )
    monkeypatch.setattr(fault.owner, fault.function, found[fault.function])


def examples_until_found(machine: type[Protocol], most: int) -> int | None:
    """Return how many examples were tried until one failed, or None if none did."""
    tried = 0

    class Counting(machine):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            nonlocal tried
            tried += 1
            super().__init__()

    try:
        run_state_machine_as_test(
            Counting,
            settings=settings(
                max_examples=most,
                stateful_step_count=60,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
                report_multiple_bugs=False,
            ),
        )
    except AssertionError:
        return tried
    return None


@pytest.mark.skipif('MODEL_EXAMPLES' not in os.environ, reason='takes minutes: make model')
@pytest.mark.parametrize('fault', FAULTS, ids=lambda fault: fault.name)
def test_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch, record_property: Any) -> None:
    put_in(fault, monkeypatch)
    tried = examples_until_found(fault.machine, MOST)
    record_property('examples', tried)
    print(f'{fault.name}: {tried}')
    assert tried
