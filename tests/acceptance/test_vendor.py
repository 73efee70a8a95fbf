"""Projects of users that test their apps on CouchDB: the examples in docs/howto/testing.rst, and others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
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


PROJECTS = {title: files for page in ('docs/howto/testing.rst',) for title, files in projects(page).items()}
#: The examples that run on any server and without Docker.
EXAMPLES = ['With celery.contrib.pytest', 'A worker in a process of its own']


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

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run pytest, and check that the output does not contain the server's password."""
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
        return done

    def pytest(self, *arguments: str) -> str:
        """Run pytest and return the output; fail the test unless pytest succeeds."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def project(tmp_path: Path, server: Server) -> Project:
    """A project without files."""
    return Project(tmp_path, server)


def passed(output: str) -> int:
    """Return the number of passed tests; fail the test if there are others."""
    summary = Counter({what: int(count) for count, what in re.findall(r'(\d+) (\w+)', output.splitlines()[-1])})
    assert not summary.keys() & {'failed', 'error', 'errors', 'skipped'}, output
    return summary['passed']


def count_tests(files: dict[str, str]) -> int:
    return sum(text.count('def test_') for text in files.values())


@pytest.mark.parametrize('title', EXAMPLES)
def test_example(project: Project, title: str) -> None:
    project.write(PROJECTS[title])
    assert passed(project.pytest()) == count_tests(PROJECTS[title])


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
    project.write(
        {
            'test_ping.py': """
        def test_image(default_couchdb_broker_image, default_worker_pytest_celery_pkg, default_worker_container_cls):
            assert default_couchdb_broker_image == 'couchdb:3.4'
            assert default_worker_pytest_celery_pkg == 'celery-couchdb[testing]'
            assert default_worker_container_cls.pytest_celery_pkg() == default_worker_pytest_celery_pkg
    """
        }
    )
    assert passed(project.pytest()) == 1


def test_missing_pytest_celery_is_one_sentence() -> None:
    done = run_python('import sys; sys.modules["pytest_celery"] = None\nimport celery_couchdb.testing', check=False)
    assert (
        done.stderr.splitlines()[-1]
        == 'ImportError: celery_couchdb.testing needs pytest-celery: pip install "celery-couchdb[testing]"'
    )
