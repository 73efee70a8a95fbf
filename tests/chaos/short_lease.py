"""A shorter lease for the leaders of a process, so that tests of what happens after a lease take seconds."""

from __future__ import annotations

from celery_couchdb.contrib.beat import scheduler
from kombu_couchdb.leases import leader

__all__ = ['shorten']


def shorten(seconds: float) -> None:
    """Let leases last for so many seconds; renewals and looks have intervals in proportion."""
    leader.LEASE_SECONDS = scheduler.LEASE_SECONDS = seconds  # type: ignore[attr-defined]
