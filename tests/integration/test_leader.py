"""The leader, one process of many: another takes over after its lease expired, or at once after a release."""

from __future__ import annotations

from typing import Any

import pytest

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.write_result import WriteStatus
from kombu_couchdb.errors import ServerUnavailable
from kombu_couchdb.leases import leader
from kombu_couchdb.leases.leader import LEASE_SECONDS, RENEWAL_SECONDS, LeaderLease


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
    leaders = [LeaderLease(client, 'job') for _ in range(5)]
    for _ in range(20):
        assert [one.step() is not None for one in leaders] == [True, False, False, False, False]
        clock.now += RENEWAL_SECONDS
    assert client.get('broker:leader:job')['holder']


def test_two_jobs_have_leaders_of_their_own(client: Client) -> None:
    assert LeaderLease(client, 'a').step()
    assert LeaderLease(client, 'b').step()


def test_another_process_takes_over_only_after_the_lease_expired(client: Client, clock: Clock) -> None:
    first, second = LeaderLease(client, 'job'), LeaderLease(client, 'job')
    assert first.step()
    silent_from = clock.now
    while not second.step():
        clock.now += 0.5
        assert clock.now - silent_from < LEASE_SECONDS + RENEWAL_SECONDS
    assert not first.leads
    assert not first.step()  # the first process was paused and resumes
    assert clock.now - silent_from >= LEASE_SECONDS


def test_released_lead_is_taken_at_the_next_step(client: Client, clock: Clock) -> None:
    first, second = LeaderLease(client, 'job'), LeaderLease(client, 'job')
    assert first.step()
    assert not second.step()
    first.release()
    assert not first.leads
    assert second.step()
    assert not first.step()


def test_leader_keeps_its_lead_during_an_outage_until_its_lease_expires(
    client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = LeaderLease(client, 'job')
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
    assert first.step()  # no other process has taken the lead


def test_lead_that_has_ended_is_not_taken_up_again(client: Client, clock: Clock) -> None:
    """A process that was paused takes the lead again in one step, but its former term stays over."""
    leader = LeaderLease(client, 'job')
    before = leader.step()
    clock.now += RENEWAL_SECONDS
    assert leader.step() == before == leader.term
    clock.now += LEASE_SECONDS + 1
    assert leader.term is None
    assert leader.step() not in (None, before)


def test_lead_ends_if_a_renewal_takes_longer_than_the_lease(
    client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, bulk = LeaderLease(client, 'job'), client.bulk
    before = leader.step()
    clock.now += RENEWAL_SECONDS

    def slow(docs: Any) -> Any:
        clock.now += LEASE_SECONDS - 1
        return bulk(docs)

    with monkeypatch.context() as patched:
        patched.setattr(client, 'bulk', slow)
        assert leader.step() != before


def test_leader_goes_on_after_the_response_to_a_renewal_was_lost(
    client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, bulk = LeaderLease(client, 'job'), client.bulk
    leader.step()
    clock.now += RENEWAL_SECONDS

    def cut(docs: Any) -> None:
        bulk(docs)
        raise ServerUnavailable('cut')

    with monkeypatch.context() as patched:
        patched.setattr(client, 'bulk', cut)
        with pytest.raises(ServerUnavailable):
            leader.step()
    leader.step()
    assert leader.step()


@pytest.mark.parametrize('step', [-86400.0, -3600.0, -1.0, 1.0, 3600.0, 86400.0])
def test_no_step_of_the_server_s_clock_ends_a_lead(
    client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    leader, standby = LeaderLease(client, 'job'), LeaderLease(client, 'job')
    term, true = leader.step(), client.clock.now
    assert not standby.step()
    monkeypatch.setattr(client.clock, 'now', lambda: true() + step)
    for _ in range(4):
        clock.now += RENEWAL_SECONDS - 1
        assert leader.step() == term
        assert not standby.step()


def test_age_of_the_document_by_a_clock_proves_nothing(
    client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that starts waits for a lease: the server's clock may just have been set."""
    assert LeaderLease(client, 'job').step()
    true, second = client.clock.now, LeaderLease(client, 'job')
    monkeypatch.setattr(client.clock, 'now', lambda: true() + 3600)
    assert not second.step()
    clock.now += LEASE_SECONDS
    assert second.step()


def test_unproven_write_gives_no_lead(client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    bulk = client.bulk
    monkeypatch.setattr(
        client, 'bulk', lambda docs: [answer._replace(status=WriteStatus.UNPROVEN) for answer in bulk(docs)]
    )
    assert not LeaderLease(client, 'job').step()


def test_process_that_loses_the_race_does_not_lead(
    client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = LeaderLease(client, 'job'), LeaderLease(client, 'job')
    monkeypatch.setattr(second, '_replaceable', lambda asked: '')  # both processes have seen that there is no document
    assert first.step()
    assert not second.step()
    monkeypatch.undo()


@pytest.mark.parametrize('holder', [5, None, {'a': 1}, ''])
def test_malformed_leader_document_is_replaced(client: Client, holder: object) -> None:
    client.put({'_id': 'broker:leader:job', 'type': 'Leader', 'holder': holder})
    assert (LeaderLease(client, 'job').step() is not None) is (holder != '')
