"""The leader, one process of many: another takes over after its lease expired, or at once after a release."""

from __future__ import annotations

from typing import Any

import pytest

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.write_result import WriteStatus
from kombu_couchdb.errors import ServerUnavailable
from kombu_couchdb.leases import leader
from kombu_couchdb.leases.leader import LEASE_SECONDS, LeaderLease

RENEWAL_SECONDS = LEASE_SECONDS / 3


class Clock:
    """The `uptime` of all leaders in a test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def uptime(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(leader, 'uptime', clock.uptime)
    return clock


def test_one_process_leads(client: Client, clock: Clock) -> None:
    leaders = [LeaderLease(client, 'job') for _ in range(5)]
    for _ in range(20):
        assert [one.step() is not None for one in leaders] == [True, False, False, False, False]
        clock.now += RENEWAL_SECONDS
    assert client.get('broker:leader:job')['holder']
    assert LeaderLease(client, 'another job').step()


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


def test_unproven_write_gives_no_lead(client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    bulk = client.bulk
    monkeypatch.setattr(
        client, 'bulk', lambda docs: [answer._replace(status=WriteStatus.UNPROVEN) for answer in bulk(docs)]
    )
    assert not LeaderLease(client, 'job').step()


@pytest.fixture
def leader_of_the_job(client: Client, clock: Clock) -> LeaderLease:
    """A leader whose lease must be renewed now."""
    one = LeaderLease(client, 'job')
    assert one.step()
    clock.now += RENEWAL_SECONDS
    return one


def test_leader_keeps_its_lead_during_an_outage_until_its_lease_expires(
    leader_of_the_job: LeaderLease, client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, before = leader_of_the_job, leader_of_the_job.term

    def away(docs: object) -> None:
        raise ServerUnavailable('away')

    with monkeypatch.context() as patched:
        patched.setattr(client, 'bulk', away)
        with pytest.raises(ServerUnavailable):
            one.step()
        assert one.leads
        clock.now += LEASE_SECONDS - RENEWAL_SECONDS
        assert (one.leads, one.term) == (False, None)
    assert one.step() not in (None, before)  # no other process has taken the lead, but the former term stays over


def test_leader_goes_on_after_the_response_to_a_renewal_was_lost(
    leader_of_the_job: LeaderLease, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    bulk = client.bulk

    def cut(docs: Any) -> None:
        bulk(docs)
        raise ServerUnavailable('cut')

    with monkeypatch.context() as patched:
        patched.setattr(client, 'bulk', cut)
        with pytest.raises(ServerUnavailable):
            leader_of_the_job.step()
    leader_of_the_job.step()
    assert leader_of_the_job.step()


@pytest.mark.parametrize('step', [-86400.0, 86400.0])
def test_dates_of_the_server_neither_end_nor_give_a_lead(
    leader_of_the_job: LeaderLease, client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    """Also a process that starts waits for a lease: the server's clock may just have been set."""
    standby, term, true = LeaderLease(client, 'job'), leader_of_the_job.term, client.clock.now
    assert not standby.step()
    monkeypatch.setattr(client.clock, 'now', lambda: true() + step)
    assert not LeaderLease(client, 'job').step()
    for _ in range(3):
        assert leader_of_the_job.step() == term
        assert not standby.step()
        clock.now += RENEWAL_SECONDS - 1
    clock.now += LEASE_SECONDS
    assert standby.step()


def test_malformed_leader_document_is_replaced(client: Client) -> None:
    client.put({'_id': 'broker:leader:job', 'type': 'Leader', 'holder': 5})
    assert LeaderLease(client, 'job').step()


def test_lead_ends_if_the_server_s_time_has_run_ahead(client: Client, clock: Clock) -> None:
    """The machine was paused, and none of its clocks went on."""
    first = LeaderLease(client, 'job')
    term = first.step()
    client.clock.gained += LEASE_SECONDS - RENEWAL_SECONDS
    assert first.leads
    assert first.step() == term
    client.clock.gained += LEASE_SECONDS
    assert not first.leads
    assert first.step() != term
