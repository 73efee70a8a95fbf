"""Clients for the databases in an app's configuration, with the app's user or an administrator, and time limits.

The time limits of a client apply to each request, and to each node. A name server may not respond either. So `start`
and `result_of` limit the time of all requests of a call together, in a thread that the program does not wait for at its
end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, TypeVar

import click

from kombu_couchdb.couchdb.address import TOKENS, Address
from kombu_couchdb.couchdb.call import HTTPOptions
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.shapes import rows
from kombu_couchdb.errors import IndexNotReady, ServerUnavailable
from kombu_couchdb.options import Options

from ..backend import CouchDBBackend
from ..connections import REQUEST_SECONDS, backend_of, client_of, has_our_broker
from ..failures import Failures
from ..jobs import Jobs
from ..resources.task import TaskSources
from .tables import Duration, echo

F = TypeVar('F', bound=Callable[..., Any])
T = TypeVar('T')

#: An index that lacks more changes than this is built before a command reads it: the request for rows waits for at most
#: 60 seconds. A request with these parameters starts that, and returns at once.
_FEW_CHANGES, _START = 10_000, {'limit': 0, 'reduce': False, 'update': 'lazy'}

#: The pause between two questions how far the index is, in seconds.
_PAUSE_SECONDS = 0.5

#: The pause between two reports of an index that CouchDB builds.
_REPORT_SECONDS = 10.0

#: How long CouchDB may make no progress with an index before a command gives up.
_STUCK_SECONDS = 300.0

#: The environment variables with the administrator's password, or its token or API key. Other users could read them on
#: the command line.
_PASSWORD_VARIABLE, _TOKEN_VARIABLE = 'COUCHDB_ADMIN_PASSWORD', 'COUCHDB_ADMIN_TOKEN'


@dataclass(frozen=True)
class Login:
    """A CouchDB user other than that of the app."""

    #: The name; None if the token has it.
    user: str | None
    password: str = field(repr=False)
    #: Whether the password is a token or an API key. It is sent as that of the app.
    is_token: bool = False

    def at(self, address: Address) -> Address:
        """Return an address with this user."""
        is_token = address.auth in TOKENS
        auth = address.auth if is_token == self.is_token else 'jwt' if self.is_token else 'basic'
        given: dict[str, Any] = {'user': self.user, 'password': self.password, 'credentials': None, 'auth': auth}
        others = tuple(replace(other, **given) for other in address.others)
        return replace(address, **given, others=others)


def app_of(ctx: click.Context) -> Any:
    """Return the Celery app that `celery -A` names."""
    return ctx.find_root().obj.app


def broker_of(
    app: Any, admin: Login | None = None, *, seconds: float = REQUEST_SECONDS, database: str | None = None
) -> Client:
    """Return a client for the database of the app's broker, or for another `database` beside it.

    `admin` is another user than that of the app, `seconds` the time limit of a request. *Raises* `ConfigurationError`
    if the broker is not CouchDB.
    """
    client = client_of(app)
    return _client(client.beside(database) if database else client, admin, seconds)


def options_of(app: Any) -> Options:
    """Return the transport options in the app's configuration. Its broker must be CouchDB."""
    with app.connection_for_write() as connection:
        options: Options = connection.transport.options
    return options


def jobs_of(ctx: click.Context) -> Jobs:
    """Return the jobs in the database of the broker of the app that `celery -A` names."""
    return Jobs(app_of(ctx), broker_of(app_of(ctx)))


def failures_of(ctx: click.Context) -> Failures:
    """Return the failures in the database of the broker of the app that `celery -A` names."""
    app = app_of(ctx)
    return Failures(app, broker_of(app), results_of(app))


def task_sources_of(ctx: click.Context) -> TaskSources:
    """Return where the app that `celery -A` names has its messages and results."""
    app = app_of(ctx)
    return TaskSources.of(app, broker_of(app) if has_our_broker(app) else None, results_of(app))


def results_of(app: Any, admin: Login | None = None, *, seconds: float = REQUEST_SECONDS) -> Client | None:
    """Return a client for the database of results; None if the app's result backend is not CouchDB."""
    backend = backend_of(app)
    return _client(backend.store.client, admin, seconds) if isinstance(backend, CouchDBBackend) else None


def admin_option(command: F) -> F:
    """Add the option `--admin` to a command. The command gets the argument `admin`: the administrator, or None."""

    def read_password(ctx: click.Context, param: click.Parameter, user: str | None) -> Login | None:
        if not user:
            return None
        if token := os.environ.get(_TOKEN_VARIABLE):
            return Login(user, token, is_token=True)
        password = os.environ.get(_PASSWORD_VARIABLE)
        return Login(user, password or click.prompt(f'Password of {user}', hide_input=True, err=True))

    return click.option(
        '--admin',
        metavar='USER',
        callback=read_password,
        help='Work as this CouchDB administrator instead of the user in the URL. The password is read from the '
        f'environment variable {_PASSWORD_VARIABLE}, or you are asked for it; a token or API key is read from '
        f'{_TOKEN_VARIABLE}.',
    )(command)


def _client(client: Client, admin: Login | None, seconds: float = REQUEST_SECONDS) -> Client:
    address = admin.at(client.address) if admin else client.address
    return (_PatientClient if seconds >= REQUEST_SECONDS else Client)(address, HTTPOptions(seconds))


class _PatientClient(Client):
    """A client that waits while CouchDB builds an index, and reports how far it is."""

    _reported = -inf
    #: The index that CouchDB builds, the number of changes that it lacks, and since when it lacks no fewer.
    _progress = ('', 0, -inf)
    #: The indexes that were found to be built.
    _built: frozenset[str] = frozenset()

    def prepare_index(self, design: str, view: str) -> None:
        while design not in self._built:
            if (changes := self.pending_changes(design)) <= _FEW_CHANGES:
                self._built |= {design}
                return
            self._report_index(design, changes)
            self.request('GET', f'/_design/{design}/_view/{view}', _START, repeat=True, shape=rows())
            time.sleep(_PAUSE_SECONDS)

    def _report_index(self, design: str, changes: int) -> None:
        now = time.monotonic()
        known, least, since = self._progress
        if design != known or changes < least:
            self._progress = design, changes, now
        elif now >= since + _STUCK_SECONDS:
            raise IndexNotReady(
                f'{self.address.url}: CouchDB makes no progress with the index {design}: repair or delete it'
            )
        if now >= self._reported + _REPORT_SECONDS:
            self._reported = now
            echo(f'CouchDB builds the index {design}: {changes:,} changes remain', err=True)


# -- time limits


def seconds_option(name: str, default: float, text: str, *, least: float = 0.1) -> Callable[[Any], Any]:
    """Return the decorator of an option with a number of seconds; `text` is its help."""
    return click.option(name, metavar='SECONDS', default=default, show_default=True, type=Duration(least), help=text)


def start(function: Callable[[], T]) -> Future[T]:
    """Call a function in a new thread, and return the future of its result."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as exc:
            future.set_exception(exc)

    threading.Thread(target=run, name='celery-couchdb-command', daemon=True).start()
    return future


def result_of(future: Future[T], seconds: float) -> T:
    """Return the result of a call, or raise its error; *raises* `ServerUnavailable` after `seconds` without either."""
    wait([future], seconds)
    if not future.done():
        raise ServerUnavailable(f'CouchDB has not responded within {seconds:g} s')
    return future.result()


def parse_address(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[str, int] | None:
    """Return host and port of `host:port`, `[::1]:port`, `:port` (every interface) or `port` (127.0.0.1)."""
    if text is None:
        return None
    host, colon, port = text.rpartition(':')
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535) or (':' in host and host[0] + host[-1] != '[]'):
        raise click.BadParameter(f'{text!r} is not an address; write host:port, for example 127.0.0.1:9808')
    return (host.strip('[]') if colon else '127.0.0.1'), int(port)
