"""The demo of a managed service, run as a process."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from celery_couchdb.testing import Server
from kombu_couchdb.errors import DatabaseMissing
from tests.support import ROOT

#: How long the demo may take on a slow machine, in seconds.
WHOLE = 1800.0


@pytest.mark.slow
def test_demo_of_a_managed_service_succeeds(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, '-m', 'examples.managed', '--patient'],
        cwd=ROOT,
        env={**os.environ, 'COUCHDB_URL': server.url},
        capture_output=True,
        text=True,
        timeout=WHOLE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'Everything succeeded' in done.stdout
    databases = re.search(r'^Databases: (\S+), (\S+);', done.stdout, re.M)
    assert databases is not None
    for name in databases.groups():
        with pytest.raises(DatabaseMissing):
            server.client(name).sequence()
