"""The sdist and the wheel: their contents, and an installation of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from celery_couchdb.testing import Server
from tests.support import ROOT

# They build the packages and install them with everything that they need.
pytestmark = pytest.mark.slow

PACKAGES = ('kombu_couchdb', 'celery_couchdb')

APP = """
import os
from celery import Celery

app = Celery('app', broker=os.environ['URL'], backend=os.environ['URL'] + '-results')

@app.task
def add(x, y):
    return x + y
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command and return its output; fail the test if the command fails."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope='module')
def tracked() -> set[str]:
    """The files of the project that git tracks."""
    listed = run('git', 'ls-files', '-z', cwd=ROOT).split('\0')
    return {name for name in listed if name and (ROOT / name).exists()}


@pytest.fixture(scope='module')
def dist(tmp_path_factory: pytest.TempPathFactory, tracked: set[str]) -> Path:
    """A folder with sdist and wheel, built from a clean checkout."""
    checkout = tmp_path_factory.mktemp('checkout')
    for name in tracked:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    run(sys.executable, '-m', 'build', '--outdir', 'dist', cwd=checkout)
    return checkout / 'dist'


def test_sdist_and_wheel_contain_what_they_should(dist: Path, tracked: set[str]) -> None:
    """And their metadata is valid for an index."""
    checked = run(sys.executable, '-m', 'twine', 'check', '--strict', *dist.iterdir(), cwd=dist)
    assert checked.count('PASSED') == 2
    with zipfile.ZipFile(next(dist.glob('*.whl'))) as archive:
        found = {name for name in archive.namelist() if '.dist-info/' not in name}
    assert found == {name for name in tracked if name.startswith(tuple(f'{package}/' for package in PACKAGES))}
    assert {f'{package}/py.typed' for package in PACKAGES} <= found
    with tarfile.open(next(dist.glob('*.tar.gz'))) as archive:
        assert tracked <= {member.name.partition('/')[2] for member in archive.getmembers() if member.isfile()}


def test_installed_package_runs_tasks(dist: Path, tmp_path: Path, server: Server, database: str) -> None:
    venv.create(tmp_path / 'venv')
    python = tmp_path / 'venv' / ('Scripts' if os.name == 'nt' else 'bin') / 'python'
    pip = (sys.executable, '-m', 'pip', '--python', python)
    run(*pip, 'install', '--quiet', '--no-compile', *dist.glob('*.whl'), cwd=tmp_path, PYTHONPATH='')
    run(*pip, 'check', cwd=tmp_path, PYTHONPATH='')
    (tmp_path / 'app.py').write_text(APP)
    environment = {'PYTHONPATH': '', 'URL': server.couchdb_url(database)}
    with (tmp_path / 'log').open('w') as log:
        worker = subprocess.Popen(
            [python, '-m', 'celery', '-A', 'app', 'worker', '-P', 'solo'],
            cwd=tmp_path,
            env={**os.environ, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        printed = run(
            python, '-c', 'from app import add; print(add.delay(2, 3).get(timeout=180))', cwd=tmp_path, **environment
        )
    finally:
        worker.terminate()
        worker.wait()
        server.client(f'{database}-results').delete()
    assert printed.strip() == '5', (tmp_path / 'log').read_text()
