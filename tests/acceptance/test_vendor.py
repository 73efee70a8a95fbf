"""Projects of users that test their apps on CouchDB: the examples in docs/howto/testing.rst."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from celery_couchdb.testing import Server
from tests.conftest import PATIENCE
from tests.support import ROOT, run_python

# Each test runs a test suite of its own.
pytestmark = pytest.mark.slow


def projects(page: str) -> dict[str, dict[str, str]]:
    """Return the files of each section with code blocks; the first line of a block is the file name."""
    _, *parts = re.split(r'^(.+)\n=+\n', (ROOT / page).read_text('utf-8'), flags=re.MULTILINE)
    found = {}
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        files = re.findall(r'\.\. code-block:: python\n\n(    # (\S+\.py)\n(?:    .*\n|\n)+)', text)
        if files:
            found[title] = {name: textwrap.dedent(block) for block, name in files}
    return found


PROJECTS = projects('docs/howto/testing.rst')


class Project:
    """A user's project, in which pytest runs without access to Docker."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.server, self.folder = server, folder / 'project'
        self.folder.mkdir()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(('PYTEST_', 'COUCHDB_'))}
        self.environment = {
            **inherited,
            'PYTHONPATH': str(ROOT),
            'COUCHDB_URL': server.url,
            'DOCKER_HOST': 'tcp://127.0.0.1:1',
        }

    def write(self, files: dict[str, str]) -> None:
        """Write the files of the project."""
        for name, text in files.items():
            (self.folder / name).write_text(textwrap.dedent(text))

    def pytest(self, *arguments: str) -> str:
        """Run pytest and return the output, which does not contain the server's password; fail the test if it fails."""
        done = subprocess.run(
            [sys.executable, '-m', 'pytest', '-p', 'no:cacheprovider', '-W', 'error::pytest.PytestWarning', *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=5 * PATIENCE,
            check=False,
        )
        assert f'{self.server.user}:{self.server.password}' not in done.stdout + done.stderr
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def project(tmp_path: Path, server: Server) -> Project:
    """A project without files."""
    return Project(tmp_path, server)


@pytest.mark.parametrize('title', ['With celery.contrib.pytest', 'A worker in a process of its own'])
def test_example(project: Project, title: str) -> None:
    project.write(PROJECTS[title])
    count = sum(text.count('def test_') for text in PROJECTS[title].values())
    assert re.fullmatch(rf'=* {count} passed(, \d+ warnings?)? in .*', project.pytest().splitlines()[-1])


def test_fixtures_of_the_docker_example(project: Project) -> None:
    project.write(PROJECTS['With Docker'])
    plan = project.pytest('--setup-plan')
    for fixture, used in (
        ('celery_broker', 'celery_couchdb_broker'),
        ('celery_couchdb_broker', 'default_couchdb_broker'),
        ('celery_backend', 'celery_couchdb_backend'),
        ('celery_couchdb_backend', 'default_couchdb_backend'),
    ):
        assert f'SETUP    F {fixture} (fixtures used: {used})' in plan


def test_missing_pytest_celery_is_one_sentence() -> None:
    done = run_python('import sys; sys.modules["pytest_celery"] = None\nimport celery_couchdb.testing', check=False)
    assert (
        done.stderr.splitlines()[-1]
        == 'ImportError: celery_couchdb.testing needs pytest-celery: pip install "celery-couchdb[testing]"'
    )
