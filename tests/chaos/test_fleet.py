"""A short version of `python -m tests.chaos.fleet`: each fault once."""

from __future__ import annotations

from pathlib import Path

from celery_couchdb.testing import Server
from tests.chaos.fleet import FAULTS, Site, run
from tests.chaos.server import Server as Victim
from tests.conftest import PATIENCE


def test_nothing_is_lost_when_listeners_are_killed(server: Server, tmp_path: Path) -> None:
    with Site(Victim(server.url), tmp_path, consumers=10) as site:
        verdict = run(site, FAULTS, 1, PATIENCE, print)
        print(verdict, (tmp_path / 'consumers.log').read_text()[-5_000:])
    assert verdict.holds
