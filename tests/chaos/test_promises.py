"""A short version of `make chaos`: each kind of fault once, while real workers run 200 tasks.

The test does not stop the server: the embedded server would lose its data, and Apache CouchDB is not started by the
tests. Instead the proxy refuses connections.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from celery_couchdb.testing import Server
from tests.chaos.faults import faults_of
from tests.chaos.plan import plan
from tests.chaos.report import complaints
from tests.chaos.run import run
from tests.chaos.server import Server as Victim
from tests.chaos.site import Site
from tests.conftest import PATIENCE


def test_promises_hold(server: Server, tmp_path: Path) -> None:
    pytest.importorskip('time_machine', reason='time-machine is not installed; it sets clocks wrong')
    kinds = faults_of(stopping=False, killing=False)
    planned = plan(6, 200, len(kinds), {name: (kind.span[0], kind.span[0]) for name, kind in kinds.items()})
    with Site(Victim(server.url), tmp_path) as site:
        verdict = run(planned, site, kinds, 2 * PATIENCE, print)
        for log in sorted(tmp_path.glob('*.log')):
            print(f'---- {log.name}\n{log.read_text()[-20_000:]}')
    assert verdict.holds, complaints(verdict)
    assert verdict.tasks >= 200
    assert verdict.faults == Counter(list(kinds))
