"""Mutation tests: the state machine finds each of these faults when it is put into the product."""

from __future__ import annotations

import pytest

from kombu_couchdb.consumer.cycle import Cycle
from kombu_couchdb.consumer.heartbeat import Heartbeat
from kombu_couchdb.consumer.pending_writes import PendingWrites
from kombu_couchdb.consumer.unacked import Unacked
from kombu_couchdb.consumer.worker_hooks import Suspects
from kombu_couchdb.couchdb.group_commit import GroupCommit
from kombu_couchdb.documents import conflict_rules, workitem
from kombu_couchdb.leases.lease import Watch
from kombu_couchdb.leases.sweeper import Sweeper
from kombu_couchdb.limits.permits import Slots
from kombu_couchdb.queues import unique_jobs

from .exploring import Fault, assert_found, finds_faults
from .limited import LimitedCluster, LimitedSingle
from .machine import Cluster, Single
from .publishing import PublishingCluster, PublishingJob, PublishingSingle
from .removing import RemovingSingle

FAULTS = [
    Fault(
        'an expired heartbeat is not deleted',
        Single,
        Sweeper,
        '_delete_heartbeats',
        'client.bulk([deletion(doc) for doc in docs])',
        "[type('', (), {'is_proven': True}) for doc in docs]",
    ),
    Fault(
        'a consumer that lost its lease keeps its messages',
        Single,
        Heartbeat,
        '_begin_anew',
        'self._unacked.drop_all()',
        '[]',
    ),
    Fault(
        'messages are delivered after the lease has ended',
        Single,
        Unacked,
        'deliver',
        'is_held and not self._lease.valid',
        'False',
    ),
    Fault(
        'kombu gets what is claimed ahead',
        Single,
        Unacked,
        '_refill',
        'credit.handed < credit.limit',
        'True',
    ),
    Fault(
        'an acknowledgement does not wait for the result',
        Single,
        PendingWrites,
        'take_ready',
        'self._is_ready(group[1])',
        'True',
    ),
    Fault(
        'a consumer that learns of a pause goes on to claim with the credit that it has',
        Single,
        Cycle,
        'run',
        'for queue, free in credit.items() if queue not in paused',
        'for queue, free in credit.items()',
    ),
    Fault(
        'a consumer that learns of a pause keeps what kombu has not received',
        Single,
        Unacked,
        'pause',
        "delivery.doc['queue'] in paused",
        'False',
    ),
    Fault(
        'the sweep trusts the wall clock',
        Single,
        Watch,
        'silent',
        'self._looked - seen.since > seen.longest_silence',
        'seen.expires + GRACE_SECONDS < self._clock.now()',
    ),
    Fault(
        'silence counts while the server does not respond',
        Single,
        Watch,
        'interrupted',
        'min(now, seen.since + seconds)',
        'seen.since',
    ),
    Fault(
        'an unproven heartbeat renews the lease',
        Cluster,
        Heartbeat,
        'unproven',
        'proven=False',
        'proven=True',
    ),
    Fault(
        'nobody withdraws a leaf behind a claim that is held',
        LimitedCluster,
        conflict_rules,
        'resolve_item',
        'if held and not lower:',
        'if held:',
    ),
    Fault(
        'an unproven slot counts',
        LimitedCluster,
        Slots,
        '_create',
        'result.is_proven',
        'result.is_stored',
    ),
    Fault(
        'slots of living consumers are freed',
        LimitedSingle,
        Slots,
        'sweep',
        'name in expired or (name in unknown and name not in living)',
        'True',
    ),
    Fault(
        'a removed message is released when its claim ends',
        RemovingSingle,
        workitem,
        'release',
        "isinstance(removed := doc.get('removed'), (int, float))",
        'removed := None',
    ),
    Fault(
        'a consumer that was cut off does not ask what was removed',
        RemovingSingle,
        Suspects,
        'check',
        "leaf.get('removed')",
        'False',
    ),
    *(
        Fault(
            'a message is published without a fixed revision',
            machine,
            GroupCommit,
            '_write',
            'self._client.create_once if self._once',
            'self._client.bulk if self._once',
        )
        for machine in (PublishingSingle, PublishingCluster)
    ),
    Fault(
        'a unique job is written without the revision that was read',
        PublishingJob,
        unique_jobs,
        '_store',
        "{**doc, '_rev': _opened(client, job, shown)}",
        '{**doc}',
    ),
]


@finds_faults
@pytest.mark.parametrize('fault', FAULTS, ids=lambda fault: fault.name)
def test_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_found(fault, monkeypatch)
