"""`celery -A app couchdb setup` and `… status`: beside real workers, on a terminal, and until a signal."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys

import click
import pytest

from kombu_couchdb.errors import AccessDenied
from tests.conftest import PATIENCE, wait_for
from tests.support import ROOT

from .conftest import Site, celery, couchdb, listed, sentence, succeeded


def arguments(*given: str) -> list[str]:
    return [sys.executable, '-m', 'celery', '-A', 'tests.acceptance.app', 'couchdb', *given]


def environment(site: Site, **more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ('NO_COLOR', 'COLUMNS')}
    return {**inherited, **site.environment, 'SETTINGS': '{}', **more}


def on_a_terminal(site: Site, *given: str, prompt: str = '\0', answer: str = '', **more: str) -> str:
    """Return the output of a command on a terminal of 24 lines and 80 columns, which answers a prompt."""
    words, variables = arguments(*given), environment(site, **more)
    child, terminal = pty.fork()
    if not child:
        try:
            os.chdir(ROOT)
            os.execve(words[0], words, variables)
        finally:
            os._exit(70)
    written, is_asked = b'', False
    try:
        while part := os.read(terminal, 4096):
            written += part
            if not is_asked and prompt.encode() in written:
                is_asked = True
                os.write(terminal, answer.encode() + b'\n')
    except OSError:
        pass  # Linux reports a closed terminal as an error
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, written.decode()
    return written.decode()


def test_members_need_no_more_rights_after_setup(site: Site, member: dict[str, str]) -> None:
    site.use_as(**member)
    with pytest.raises(AccessDenied, match='let an administrator run "celery -A your_app couchdb setup" once'):
        site.send('add', 1, 2)
    assert 'name an administrator of CouchDB with --admin' in sentence(couchdb(site, 'setup'))
    assert 'run "celery -A your_app couchdb setup"' in sentence(couchdb(site, 'status'))

    administrator = ('setup', '--admin', site.server.user)
    password = {'COUCHDB_ADMIN_PASSWORD': site.server.password}
    planned = succeeded(couchdb(site, *administrator, '--dry-run', **password))
    assert planned.endswith('Nothing was changed: this was a dry run.\n')
    assert 'run "celery -A your_app couchdb setup"' in sentence(couchdb(site, 'status'))
    done = succeeded(couchdb(site, *administrator, **password))
    assert done == planned.replace('not yet', 'done   ').rpartition('Nothing')[0]
    assert member['user'] in done
    assert member['password'] not in done

    site.worker('-Q', 'celery')
    assert site.send('add', 1, 2).get(timeout=PATIENCE) == 3
    gone = celery('couchdb', 'check', '--worker', 'gone@x', **site.environment)
    assert (gone.returncode, gone.stdout) == (1, '')
    assert re.fullmatch('Error: worker gone@x has no consumer: .+\n', gone.stderr)
    # No step is left, as a member can see, too.
    assert ' done ' not in succeeded(couchdb(site, *administrator, **password))
    assert ' ok ' in (again := succeeded(couchdb(site, 'setup')))
    assert ' done ' not in again
    assert [status['queues'].keys() for status in listed(site, 'status')] == [{'celery'}]


def test_typed_password_is_not_echoed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv('COUCHDB_ADMIN_PASSWORD', raising=False)
    password, prompt = site.server.password, f'Password of {site.server.user}: '  # its blank comes after echo is off
    words = ('setup', '--admin', site.server.user, '--dry-run')
    written = on_a_terminal(site, *words, prompt=prompt, answer=password)
    assert 'Nothing was changed' in written
    assert password not in written


def test_setup_with_another_broker(site: Site) -> None:
    site.use('memory://', site.environment['RESULT_URL'])
    assert site.results in succeeded(couchdb(site, 'setup'))
    assert 'the broker of this app is memory, not CouchDB' in sentence(couchdb(site, 'status'))


def test_status_of_a_busy_site(site: Site) -> None:
    """The worker has a prefetch count of 3 and runs one task."""
    site.worker('-Q', 'celery,mail', concurrency=1, worker_prefetch_multiplier=3)
    for number in range(6):
        site.send('late_nap', str(site.journal), str(number), None, queue='mail')
    site.send('add', 1, 2, countdown=3600)
    site.send('add', 1, 2, queue='forgotten')
    wait_for(lambda: listed(site, 'status')[0]['queues']['mail']['running'] == 1, 'the worker to report its task')
    page = succeeded(couchdb(site, 'status', COLUMNS='100')).splitlines()
    assert max(map(len, page)) <= 100
    lines = [line.split()[:6] for line in page]
    assert [line for line in lines if line[1:] and line[1] in ('READY', '0', '1', '3')][:4] == [
        ['QUEUE', 'READY', 'SCHEDULED', 'PREFETCHED', 'RUNNING', 'DEAD'],
        ['celery', '0', '1', '0', '0', '0'],
        ['forgotten', '1', '0', '0', '0', '0'],
        ['mail', '3', '0', '2', '1', '0'],
    ]
    assert 'pidbox' not in str(page)
    assert 'pidbox' in succeeded(couchdb(site, 'status', '--all'))
    site.go_on()


def test_ctrl_c_ends_watching(site: Site) -> None:
    succeeded(couchdb(site, 'setup'))
    with subprocess.Popen(
        arguments('status', '--watch', '0.2', '--json'),
        cwd=ROOT,
        env=environment(site),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        for _ in range(3):
            assert json.loads(process.stdout.readline())['server']
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
        assert (process.returncode, errors) == (0, '')


def test_terminals_get_colours_and_names_in_several_lines(site: Site) -> None:
    site.send('add', 1, 2, queue='q' * 70)
    coloured = on_a_terminal(site, 'status')
    assert '\x1b[' in coloured
    page = click.unstyle(coloured).splitlines()
    table = [line for line in page if not line.startswith('No worker consumes')]  # a sentence may be wrapped
    assert max(map(len, table)) <= 80
    assert sum(line.count('q') for line in table if 'qqq' in line) == 70
    assert '\x1b[' not in on_a_terminal(site, 'status', NO_COLOR='1')
    assert 'q' * 70 in succeeded(couchdb(site, 'status'))
