"""Ids of tasks: those of an app with our result backend begin with the time."""

from __future__ import annotations

import subprocess
import sys
import time
from uuid import RFC_4122

import pytest

from celery_couchdb.patches.results import new_id
from tests.support import ROOT

#: 32 bits of the time, in units of 2 ** 14 nanoseconds.
WRAP = 2**46


def test_ids_are_uuids_and_differ() -> None:
    ids = [new_id() for _ in range(10_000)]
    assert len(set(ids)) == len(ids)
    assert {(each.version, each.variant) for each in ids} == {(8, RFC_4122)}


@pytest.mark.parametrize('after', [2**14, 10**9, 3600 * 10**9])
def test_later_ids_sort_after_earlier_ones(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    start = 40_000 * WRAP
    ids = []
    for moment in (start, start + after):
        monkeypatch.setattr(time, 'time_ns', lambda moment=moment: moment)
        ids.append(str(new_id()))
    assert ids == sorted(ids)
    assert ids[0][:8] != ids[1][:8]  # operators see and type eight characters


@pytest.mark.parametrize(
    ('backend', 'version'), [('couchdb://localhost:1/results', 8), ('cache+memory://', 4), ('disabled://', 4)]
)
def test_only_with_our_backend(backend: str, version: int) -> None:
    program = (
        'import celery, uuid\n'
        f'app = celery.Celery(broker="memory://", backend={backend!r})\n'
        'app.backend\n'
        'print(uuid.UUID(app.send_task("add").id).version, app.send_task("add", task_id="own").id)\n'
    )
    printed = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stdout.split() == [str(version), 'own']
