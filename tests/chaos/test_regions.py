"""A short version of `python -m tests.chaos.regions`: links are broken and a worker is killed while 120 tasks run.

All regions are on one server, which the test does not stop; the links between them lead through proxies.
"""

from __future__ import annotations

from pathlib import Path

from celery_couchdb.testing import Server
from tests.chaos.faults.regions import LINK_FAULTS
from tests.chaos.faults.workers import WorkerKilled
from tests.chaos.region_orders import planned_orders
from tests.chaos.region_site import NAMES, Regions
from tests.chaos.regions import planned, run
from tests.chaos.report import complaints
from tests.chaos.server import Server as Victim
from tests.conftest import PATIENCE


def test_nothing_is_lost_and_nothing_runs_twice_between_regions(server: Server, tmp_path: Path) -> None:
    orders = planned_orders(1, 120, NAMES[:2])
    faults = planned(1, links=len(LINK_FAULTS), workers=1, pauses=0, refusals=0, servers=0, longest=2.0)
    with Regions([[Victim(server.url)]] * 2, tmp_path) as regions:
        verdict = run(regions, orders, faults, PATIENCE, print)
        for log in sorted(tmp_path.glob('*.log')):
            print(f'---- {log.name}\n{log.read_text()[-20_000:]}')
    assert verdict.holds, complaints(verdict)
    assert verdict.faults == {**{kind.name: 1 for kind in LINK_FAULTS}, WorkerKilled.name: 1}
