"""The leader, one process of many: another takes over after its lease expired, or at once after a release."""

from __future__ import annotations

import pytest

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.write_result import WriteStatus
from kombu_couchdb.errors import ServerUnavailable
from kombu_couchdb.leases import leader
from kombu_couchdb.leases.leader import LEASE_SECONDS, RENEWAL_SECONDS, Leader


class Clock:
    """The monotonic clock of all leaders in a test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(leader, 'time', clock)
    return clock


def test_one_process_leads(client: Client, clock: Clock) -> None:
    leaders = [Leader(client, 'job') for _ in range(5)]
    for _ in range(20):
        assert [one.step() for one in leaders] == [True, False, False, False, False]
        clock.now += RENEWAL_SECONDS
    assert client.get('broker:leader:job')['holder']


def test_two_jobs_have_leaders_of_their_own(client: Client) -> None:
    assert Leader(client, 'a').step()
    assert Leader(client, 'b').step()


def test_another_process_takes_over_only_after_the_lease_expired(client: Client, clock: Clock) -> None:
    first, second = Leader(client, 'job'), Leader(client, 'job')
    assert first.step()
    silent_from = clock.now
    while not second.step():
        clock.now += 0.5
        assert clock.now - silent_from < LEASE_SECONDS + RENEWAL_SECONDS
    assert not first.leads
    assert not first.step()  # the first process was paused and resumes
    assert clock.now - silent_from >= LEASE_SECONDS


def test_released_lead_is_taken_at_the_next_step(client: Client, clock: Clock) -> None:
    first, second = Leader(client, 'job'), Leader(client, 'job')
    assert first.step()
    assert not second.step()
    first.release()
    assert not first.leads
    assert second.step()
    assert not first.step()


def test_leader_keeps_its_lead_during_an_outage_until_its_lease_expires(
    client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Leader(client, 'job')
    assert first.step()

    def away(docs: object) -> None:
        raise ServerUnavailable('away')

    with monkeypatch.context() as patched:
        patched.setattr(client, 'bulk', away)
        clock.now += RENEWAL_SECONDS
        with pytest.raises(ServerUnavailable):
            first.step()
        assert first.leads
        clock.now += LEASE_SECONDS - RENEWAL_SECONDS
        assert not first.leads
    assert not first.step()  # another process may lead, so that the first step only looks
    clock.now += LEASE_SECONDS
    assert first.step()


def test_unproven_write_gives_no_lead(client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    bulk = client.bulk
    monkeypatch.setattr(
        client, 'bulk', lambda docs: [answer._replace(status=WriteStatus.UNPROVEN) for answer in bulk(docs)]
    )
    assert not Leader(client, 'job').step()


def test_process_that_loses_the_race_does_not_lead(
    client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Leader(client, 'job'), Leader(client, 'job')
    monkeypatch.setattr(second, '_replaceable', lambda asked: '')  # both processes have seen that there is no document
    assert first.step()
    assert not second.step()
    monkeypatch.undo()


@pytest.mark.parametrize('holder', [5, None, {'a': 1}, ''])
def test_malformed_leader_document_is_replaced(client: Client, holder: object) -> None:
    client.put({'_id': 'broker:leader:job', 'type': 'Leader', 'holder': holder})
    assert Leader(client, 'job').step() is (holder != '')
