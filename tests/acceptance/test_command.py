"""`celery -A app couchdb setup` and `… status`, run as a process next to real workers."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from typing import Any

import click
import pytest

from kombu_couchdb.errors import AccessDenied
from tests.conftest import PATIENCE, wait_for
from tests.support import ROOT

from .conftest import Site

Run = subprocess.CompletedProcess[str]


def arguments(*given: str) -> list[str]:
    return [sys.executable, '-m', 'celery', '-A', 'tests.acceptance.app', 'couchdb', *given]


def environment(site: Site, **more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ('NO_COLOR', 'COLUMNS')}
    return {**inherited, **site.environment, 'SETTINGS': '{}', **more}


def couchdb(site: Site, *given: str, **more: str) -> Run:
    """Run a command of `celery couchdb`, and check that its output contains no password."""
    done = subprocess.run(
        arguments(*given),
        cwd=ROOT,
        env=environment(site, **more),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert f'{site.server.user}:{site.server.password}' not in done.stdout + done.stderr
    return done


def succeeded(done: Run) -> str:
    """Return the output of a command; fail the test if the command failed."""
    assert done.returncode == 0, done.stderr
    assert done.stderr == ''
    return done.stdout


def sentence(done: Run) -> str:
    """Return the error message of a failed command, which is one sentence."""
    assert done.returncode == 1
    assert done.stdout == ''
    [line] = done.stderr.splitlines()
    return line


# -- setup


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
    # No step is left, as a member can see, too.
    assert ' done ' not in succeeded(couchdb(site, *administrator, **password))
    assert ' ok ' in (again := succeeded(couchdb(site, 'setup')))
    assert ' done ' not in again
    status = succeeded(couchdb(site, 'status', '--json'))
    assert json.loads(status)['queues'].keys() == {'celery'}
    assert member['password'] not in status


def test_typed_password_is_not_echoed(site: Site) -> None:
    words, variables = arguments('setup', '--admin', site.server.user, '--dry-run'), environment(site)
    variables.pop('COUCHDB_ADMIN_PASSWORD', None)
    child, terminal = pty.fork()
    if not child:
        try:
            os.chdir(ROOT)
            os.execve(words[0], words, variables)
        finally:
            os._exit(70)
    written, prompt = b'', f'Password of {site.server.user}: '.encode()
    try:
        while part := os.read(terminal, 4096):
            asked, written = prompt in written, written + part
            if not asked and prompt in written:  # the blank of the prompt is written after echo was switched off
                os.write(terminal, site.server.password.encode() + b'\n')
    except OSError:
        pass  # Linux reports a closed terminal as an error
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, written.decode()
    assert b'Nothing was changed' in written
    assert site.server.password.encode() not in written


def test_setup_with_another_broker(site: Site) -> None:
    site.environment['BROKER_URL'] = 'memory://'
    assert site.results in succeeded(couchdb(site, 'setup'))
    assert 'the broker of this app is memory, not CouchDB' in sentence(couchdb(site, 'status'))


# -- status


def test_status_of_a_busy_site(site: Site) -> None:
    site.worker('-Q', 'celery,mail')
    site.send('nap', str(site.journal), 'one', 600, queue='mail')
    site.send('add', 1, 2, countdown=3600)
    site.send('add', 1, 2, queue='forgotten')
    wait_for(site.journalled, 'the task to start')

    def found() -> dict[str, Any]:
        status: dict[str, Any] = json.loads(succeeded(couchdb(site, 'status', '--json')))
        return status

    queues = found()['queues']
    assert queues.keys() == {'celery', 'mail', 'forgotten'}
    assert (queues['celery']['scheduled'], queues['forgotten']['ready']) == (1, 1)
    [consumer] = found()['consumers']
    assert consumer['alive']
    assert consumer['queues'] == ['celery', 'mail']
    assert found()['database']['name'] == site.database
    assert any('pidbox' in name for name in json.loads(succeeded(couchdb(site, 'status', '--json', '--all')))['queues'])

    page = succeeded(couchdb(site, 'status')).splitlines()
    assert max(map(len, page)) <= 80
    assert any(line.split()[:2] == ['forgotten', '1'] for line in page)
    assert '\x1b' not in ''.join(page)


def test_held_counts_unacknowledged_messages(site: Site) -> None:
    """A worker with a prefetch count of 3 runs one task."""
    worker = site.worker('-Q', 'celery', concurrency=1, worker_prefetch_multiplier=3)
    for name in 'abcdef':
        site.send('late_nap', str(site.journal), name, None)
    wait_for(site.journalled, 'the first task to start')

    def found() -> tuple[int, int]:
        queue = json.loads(succeeded(couchdb(site, 'status', '--json')))['queues']['celery']
        return queue['ready'], queue['held']

    wait_for(lambda: found() == (3, 3), 'the worker to hold three messages')
    active = site.app.control.inspect([worker.hostname()], timeout=PATIENCE, limit=1).active()
    assert [len(tasks) for tasks in active.values()] == [1]
    page = [line.split() for line in succeeded(couchdb(site, 'status')).splitlines()]
    assert page[2][:5] == ['QUEUE', 'READY', 'SCHEDULED', 'HELD', 'DEAD']
    assert page[3][:5] == ['celery', '3', '0', '3', '0']
    site.go_on()


@pytest.mark.parametrize(('given', 'begin'), [(['--json'], '{"server"'), ([], 'CouchDB')])
def test_ctrl_c_ends_watching(site: Site, given: list[str], begin: str, apache_couchdb: bool) -> None:
    succeeded(couchdb(site, 'setup'))
    with subprocess.Popen(
        arguments('status', '--watch', '0.2', *given),
        cwd=ROOT,
        env=environment(site),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        shown = 0
        for line in process.stdout:
            shown += line.startswith(begin if apache_couchdb else begin.replace('CouchDB', 'PouchDB'))
            if shown == 3:
                process.send_signal(signal.SIGINT)
                break
        _, errors = process.communicate(timeout=PATIENCE)
        assert (process.returncode, errors) == (0, '')


def on_a_terminal(site: Site, *given: str, **more: str) -> str:
    """Return the output of a command on a terminal of 24 lines and 80 columns."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(arguments(*given), cwd=ROOT, env=environment(site, **more), stdout=theirs) as process:
        os.close(theirs)
        written = b''
        try:
            while part := os.read(ours, 4096):
                written += part
        except OSError:
            pass  # Linux reports a closed terminal as an error
        os.close(ours)
        assert process.wait(PATIENCE) == 0
    return written.decode()


def test_long_names_are_cut_only_on_a_terminal(site: Site) -> None:
    site.send('add', 1, 2, queue='q' * 70)
    page = click.unstyle(on_a_terminal(site, 'status')).splitlines()
    assert max(map(len, page)) <= 80
    assert any('q…q' in line for line in page)
    assert 'q' * 70 in succeeded(couchdb(site, 'status'))


@pytest.mark.parametrize(('more', 'coloured'), [({}, True), ({'NO_COLOR': '1'}, False)])
def test_colours_on_terminals_can_be_switched_off(site: Site, more: dict[str, str], coloured: bool) -> None:
    succeeded(couchdb(site, 'setup'))
    for command in ('status', 'setup'):
        assert ('\x1b[' in on_a_terminal(site, command, **more)) is coloured
