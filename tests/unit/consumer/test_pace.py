"""When cycles begin and how long acks wait (`kombu_couchdb.consumer.pace`)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kombu_couchdb.consumer import pace as module
from kombu_couchdb.consumer.delivery import Credit
from kombu_couchdb.consumer.pace import Pace


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, 'time', SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_messages_flow_after_a_cycle_with_several_claims(clock: SimpleNamespace) -> None:
    pace = Pace()
    assert not pace.flowing
    pace.claimed(1)
    assert not pace.flowing
    pace.claimed(2)
    assert pace.flowing
    clock.now += 0.2
    assert not pace.flowing


def test_feed_is_slower_only_while_messages_flow(clock: SimpleNamespace) -> None:
    pace = Pace()
    assert pace.feed_interval == 0.0
    pace.claimed(2)
    assert pace.feed_interval == pytest.approx(0.028)


def test_ack_of_a_single_message_waits_for_20_ms(clock: SimpleNamespace) -> None:
    pace = Pace()
    pace.begin()
    pace.claimed(1)
    assert pace.ack_delay(Credit(4), more_to_claim=False) == 0.02


def test_ack_waits_for_the_next_messages_while_they_flow(clock: SimpleNamespace) -> None:
    pace = Pace()
    pace.claimed(2)
    assert 0.028 < pace.ack_delay(Credit(4), more_to_claim=False) < 0.1


def test_ack_with_more_to_claim_waits_for_the_pace(clock: SimpleNamespace) -> None:
    pace, credit = Pace(), Credit(4, held=3)
    assert pace.ack_delay(credit, more_to_claim=True) == 0.005
    pace.begin()
    clock.now += 0.01
    assert pace.ack_delay(credit, more_to_claim=True) == pytest.approx(0.05)
    clock.now += 0.1
    assert pace.ack_delay(credit, more_to_claim=True) == 0.005


def test_ack_that_waited_for_its_result_shares_the_next_cycle_of_a_flow(clock: SimpleNamespace) -> None:
    pace = Pace()
    pace.begin()
    assert pace.seconds_to_next == 0.0
    pace.claimed(2)
    clock.now += 0.01
    assert pace.seconds_to_next == pytest.approx(0.05)
    clock.now += 0.08
    assert pace.seconds_to_next == 0.0


@pytest.mark.parametrize('credit', [Credit(4, held=2), Credit(1), Credit()], ids=['half', 'one', 'unlimited'])
def test_ack_does_not_wait_if_the_messages_run_out(clock: SimpleNamespace, credit: Credit) -> None:
    pace = Pace()
    pace.begin()
    assert pace.ack_delay(credit, more_to_claim=True) == 0.0
