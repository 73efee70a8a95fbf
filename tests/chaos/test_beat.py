"""A short version of `python -m tests.chaos.beat`: each fault once, while an entry is edited every second."""

from __future__ import annotations

from pathlib import Path

from celery_couchdb.testing import Server
from tests.chaos.beat import FAULTS, Site, run
from tests.chaos.server import Server as Victim
from tests.conftest import PATIENCE


def test_each_due_date_is_sent_once(server: Server, tmp_path: Path) -> None:
    with Site(Victim(server.url), tmp_path, lease=5.0) as site:
        broken = run(site, [*FAULTS], 1, PATIENCE, print)
        for log in sorted(tmp_path.glob('*.log')):
            print(f'---- {log.name}\n{log.read_text()[-5_000:]}')
    assert broken == []
