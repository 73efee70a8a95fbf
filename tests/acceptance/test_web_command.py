"""The command `celery couchdb web` as a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import requests

pytest.importorskip('starlette')

from tests.conftest import PATIENCE

from .conftest import Site, couchdb, succeeded

#: Starts the command with these arguments, and returns the process and the URL of the page.
Start = Callable[..., tuple[subprocess.Popen[str], str]]


@pytest.fixture
def start(site: Site, stack: ExitStack) -> Start:
    site.set_up()

    def start(*arguments: str) -> tuple[subprocess.Popen[str], str]:
        url = site.environment['BROKER_URL']
        command = [sys.executable, '-m', 'celery', '-b', url, '--result-backend', 'disabled', 'couchdb', 'web']
        process = stack.enter_context(subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True))
        stack.callback(process.kill)
        assert process.stderr
        said = process.stderr.readline()
        found = re.fullmatch(r'The page is at (http://127\.0\.0\.1:\d+/\S*)\n', said)
        assert found, said
        return process, found[1]

    return start


@pytest.mark.parametrize('end', [signal.SIGTERM, signal.SIGINT])
def test_page_is_served_until_the_process_ends(start: Start, end: signal.Signals) -> None:
    process, url = start('--listen', '127.0.0.1:0')
    assert requests.get(f'{url}health', timeout=PATIENCE).status_code == 200
    assert requests.get(url, timeout=PATIENCE).url == f'{url}login'
    process.send_signal(end)
    assert (process.wait(PATIENCE), process.stderr and process.stderr.read()) == (0, '')


def test_open_pages_do_not_hold_up_the_end(start: Start) -> None:
    process, url = start('--listen', '127.0.0.1:0', '--no-login', '--url-prefix', '/celery')
    assert url.endswith('/celery/')
    with requests.get(f'{url}events', stream=True, timeout=PATIENCE) as events:
        assert next(events.iter_lines()) == b'retry: 2000'
        process.terminate()
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (('--no-login', '--listen', '0.0.0.0:0'), '--no-login is for this machine alone: listen on 127.0.0.1'),
        (('--no-login', '--listen', ':0'), '--no-login is for this machine alone'),
        (('--no-login', '--trust-header', 'X-User'), 'Give --no-login or --trust-header, not both'),
        (('--url-prefix', 'celery'), '--url-prefix must be a path'),
        (('--listen', 'nowhere.invalid:0'), 'cannot listen on nowhere.invalid:0'),
    ],
)
def test_mistakes_are_one_sentence(site: Site, arguments: tuple[str, ...], words: str) -> None:
    site.set_up()
    done = couchdb(site, 'web', *arguments)
    assert (done.exit_code > 0, done.stdout) == (True, '')
    assert done.stderr.splitlines()[-1].startswith(f'Error: {words}')


def test_help(site: Site) -> None:
    assert '--trust-header' in succeeded(couchdb(site, 'web', '--help'))
