"""A short version of `python -m chaos.regions`: links are broken and a worker is killed while 60 tasks run.

All regions are on one server, which the test does not stop; the links between them lead through proxies.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from celery_couchdb.testing import Server
from chaos.faults.regions import LinkCut, LinkHangs
from chaos.faults.workers import WorkerKilled
from chaos.region_site import Regions
from chaos.regions import planned, run
from chaos.report import complaints
from chaos.server import Server as Victim
from tests.conftest import PATIENCE


def test_nothing_is_lost_and_nothing_runs_twice_between_regions(server: Server, tmp_path: Path) -> None:
    if server.process is not None:
        pytest.skip('the embedded server has no replicator that reaches URLs')
    faults = planned(1, links=2, workers=1, servers=0, longest=2.0)
    with Regions([Victim(server.url)] * 2, tmp_path) as regions:
        verdict = run(regions, 60, faults, PATIENCE, print)
        for log in sorted(tmp_path.glob('*.log')):
            print(f'---- {log.name}\n{log.read_text()[-20_000:]}')
    assert verdict.holds, complaints(verdict)
    assert verdict.tasks == 60
    assert verdict.faults == {kind.name: 1 for kind in (LinkCut, LinkHangs, WorkerKilled)}
