"""The optional rooms can be removed: the folders `contrib`, the lines of the rooms, and the tests that use them."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from celery_couchdb.testing import Server
from tests.support import ROOT

#: What is removed.
FOLDERS = ('kombu_couchdb/contrib', 'celery_couchdb/contrib', 'tests/contrib')

#: Tests of consumers, the result backend, jobs and commands, which run without the rooms.
TESTS = tuple(f'tests/integration/test_{name}.py' for name in ('ack', 'backend', 'dead_letters'))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the project without the rooms and without the tests that import them."""
    ignored = shutil.ignore_patterns('__pycache__', 'node_modules')
    for name in ('kombu_couchdb', 'celery_couchdb', 'tests'):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ('pyproject.toml', 'setup.cfg', 'README.rst'):
        shutil.copy(ROOT / name, tmp_path)
    for folder in FOLDERS:
        shutil.rmtree(tmp_path / folder)
    for package in ('kombu_couchdb', 'celery_couchdb'):
        rooms = tmp_path / package / 'rooms.py'
        rooms.write_text(re.sub(r'^    .*_couchdb\.contrib\..*,\n', '', rooms.read_text(), flags=re.MULTILINE))
    removed = tuple(folder.replace('/', '.') for folder in FOLDERS)
    for path in (tmp_path / 'tests').rglob('test_*.py'):
        if any(name.startswith(removed) for name in imports_of(path)):
            path.unlink()
    return tmp_path


def imports_of(path: Path) -> set[str]:
    """Return the full names of what a test module imports, and what the helpers import that it uses."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    found = {f'{node.module}.{alias.name}' for node in nodes for alias in node.names if not node.level}
    for name in ('parcels', 'regions'):
        if any(each.startswith(f'tests.{name}.') for each in found):
            found.add(f'celery_couchdb.contrib.{name}')
    return found


@pytest.mark.slow
def test_core_works_without_the_rooms(copy: Path, server: Server) -> None:
    # What this process measures is not in the copy.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith('COVERAGE_')}
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider', *TESTS],
        cwd=copy,
        env={**inherited, 'PYTHONPATH': str(copy), 'COUCHDB_URL': server.url},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
