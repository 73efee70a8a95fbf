"""The examples of the documentation, each run in its folder with a worker of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from pytest_celery import CeleryTestWorker

from tests.conftest import PATIENCE, wait_for
from tests.support import ROOT, items
from tests.tokens import Gateway, TokenServer

from .conftest import Site

EXAMPLES = ROOT / 'examples'


class Example:
    """An example in its folder, on the databases of a site."""

    def __init__(self, site: Site, name: str) -> None:
        self.site, self.folder = site, EXAMPLES / name
        self.environment = {
            'CELERY_BROKER_URL': site.environment['BROKER_URL'],
            'CELERY_RESULT_BACKEND': site.environment['RESULT_URL'],
            'DATABASE': str(site.folder / 'test.sqlite3'),
            'TEST_DATABASE': str(site.folder / 'test.sqlite3'),
        }

    def start(self, *arguments: str) -> CeleryTestWorker:
        """Start a Celery program of the example, without waiting until it is ready."""
        command = [sys.executable, '-m', 'celery', '-A', 'shop', *arguments]
        return self.site.run(command, {**self.environment, 'PYTHONPATH': str(self.folder)}, {})

    def worker(self) -> CeleryTestWorker:
        """Start the example's worker and wait until it is ready."""
        words = 'worker -l INFO --pool threads --concurrency 2 -n worker@%h'
        worker = self.start(*words.split())
        worker.ready()
        return worker

    def run(self, *arguments: str) -> str:
        """Run Python in the example's folder and return the output; fail the test if Python fails."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


def test_guide(site: Site) -> None:
    example = Example(site, 'guide')
    example.worker()
    assert example.run('send.py').splitlines() == [
        '2 + 3 = 5',
        'order 7 is paid after 2 retries',
        'the reminder is scheduled',
        'the reminder is gone',
        'the total is 550',
        '1 + 2 + 3 = 6',
        'the first was enqueued, the second moved',
    ]
    wait_for(lambda: not items(site.client), 'the queue to be empty')


def test_oidc(site: Site) -> None:
    site.set_up()
    with Gateway(site.server) as gateway, TokenServer('a secret', seconds=4) as provider:
        site.use(gateway.couchdb_url(site.database), gateway.couchdb_url(site.results))
        example = Example(site, 'oidc')
        example.environment |= {
            'OIDC_TOKEN_URL': provider.url,
            'OIDC_CLIENT_ID': 'shop',
            'OIDC_CLIENT_SECRET': 'a secret',
        }
        example.worker()
        code = 'import shop; print(*[shop.add.delay(1, n).get(timeout=60) for n in range(5)])'
        while len(provider.given) < 5:
            assert example.run('-c', code) == '1 2 3 4 5\n'
        provider.keys.clear()
        done = subprocess.run(
            [sys.executable, '-c', code],
            cwd=example.folder,
            env={**os.environ, **example.environment},
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
            check=False,
        )
        assert 'the source of the token failed: HTTPError: 400 Client Error: Bad Request for url' in done.stderr
        assert 'a secret' not in done.stderr


def test_without_celery(site: Site) -> None:
    example = Example(site, 'without_celery')
    example.environment['BROKER_URL'] = site.environment['BROKER_URL']
    assert example.run('shop.py', 'next') == 'no order\n'
    example.run('shop.py', 'send', 'bread', 'milk', 'tea')
    assert example.run('shop.py', 'next') == 'next bread\n'
    worker = site.run([sys.executable, str(example.folder / 'shop.py'), 'work'], example.environment, {})
    wait_for(lambda: 'sold milk' in worker.logs() and 'sold tea' in worker.logs(), 'the worker to receive both')
    wait_for(lambda: not items(site.client), 'the queue to be empty')
    worker.kill('SIGINT')
    worker.container.wait()
    assert 'closed' in worker.logs()


@pytest.mark.slow  # a test suite of its own
@pytest.mark.parametrize('name', ['flask', 'fastapi'])
def test_web_framework(site: Site, name: str) -> None:
    pytest.importorskip(name)
    example = Example(site, name)
    example.worker()
    assert ' passed' in example.run('-m', 'pytest', '-p', 'no:cacheprovider', 'test_shop.py')


@pytest.mark.slow  # a test suite of its own
def test_django(site: Site) -> None:
    pytest.importorskip('django')
    example = Example(site, 'django')
    assert 'No changes detected' in example.run('manage.py', 'makemigrations', '--check', '--dry-run')
    example.worker()
    assert 'Ran 3 tests' in example.run('manage.py', 'test', '--noinput')


def test_periodic(site: Site) -> None:
    example = Example(site, 'periodic')
    beat = example.start('beat', '-l', 'INFO')
    wait_for(lambda: beat.logs().count('Sending due task look for orders') >= 3, 'beat to publish the task three times')
    # The unique task was published several times, but only one message waits while there is no worker.
    [item] = wait_for(lambda: items(site.client))
    assert item['message']['headers']['task'] == 'shop.look_for_orders'
    worker = example.worker()
    wait_for(lambda: worker.logs().count('succeeded') >= 2, 'the worker to run the task twice')
