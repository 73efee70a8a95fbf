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


@pytest.fixture(scope='module')
def wheel(dist: Path) -> Path:
    """The path of the wheel."""
    [found] = dist.glob('*.whl')
    return found


def test_metadata_is_valid_for_an_index(dist: Path) -> None:
    output = run(sys.executable, '-m', 'twine', 'check', '--strict', *dist.iterdir(), cwd=dist)
    assert output.count('PASSED') == 2


def test_wheel_contains_exactly_the_packages(wheel: Path, tracked: set[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if '.dist-info/' not in name}
    assert found == {name for name in tracked if name.startswith(tuple(f'{package}/' for package in PACKAGES))}
    assert {f'{package}/py.typed' for package in PACKAGES} <= found


def test_sdist_contains_the_whole_project(dist: Path, tracked: set[str]) -> None:
    [sdist] = dist.glob('*.tar.gz')
    with tarfile.open(sdist) as archive:
        found = {member.name.partition('/')[2] for member in archive.getmembers() if member.isfile()}
    assert tracked <= found


def test_installed_package_runs_tasks(wheel: Path, tmp_path: Path, server: Server, database: str) -> None:
    venv.create(tmp_path / 'venv', with_pip=True)
    python = tmp_path / 'venv' / ('Scripts' if os.name == 'nt' else 'bin') / 'python'
    run(python, '-m', 'pip', 'install', '--quiet', wheel, cwd=tmp_path, PYTHONPATH='')
    run(python, '-m', 'pip', 'check', cwd=tmp_path, PYTHONPATH='')
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
