"""The command `celery couchdb web`: the page of operators, over HTTP."""

from __future__ import annotations

import signal
import socket
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from ..cli.clients import app_of, parse_address
from ..cli.tables import echo

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

#: What the page needs, by the names of modules.
_NEEDED = ('starlette', 'uvicorn', 'jinja2')


@click.command('web')
@click.option(
    '--listen',
    'address',
    metavar='HOST:PORT',
    default='127.0.0.1:5985',
    show_default=True,
    callback=parse_address,
    help='Where to serve the page.',
)
@click.option('--read-only', is_flag=True, help='Let nobody change anything.')
@click.option('--mask-args', is_flag=True, help='Do not show arguments and results of tasks.')
@click.option('--url-prefix', metavar='PATH', default='', help='The path of the page behind a proxy, such as /celery.')
@click.option(
    '--trust-header',
    metavar='NAME',
    help='The header in which a proxy says who sends a request, such as X-Forwarded-User. There is no login, and the '
    "page works as the app's CouchDB user. Only the proxy may reach the page.",
)
@click.option('--no-login', is_flag=True, help="Work as the app's CouchDB user, for users of this machine.")
@click.option(
    '--reader-role',
    metavar='ROLE',
    default='celery-reader',
    show_default=True,
    help='Users with this CouchDB role see everything, and can change nothing.',
)
@click.pass_context
def command(
    ctx: click.Context,
    address: tuple[str, int],
    read_only: bool,
    mask_args: bool,
    url_prefix: str,
    trust_header: str | None,
    no_login: bool,
    reader_role: str,
) -> None:
    """Serve the dashboard for operators.

    It shows queues, jobs, failures, workers and schedules, and lets operators change them. This needs some packages:
    pip install 'celery-couchdb[web]'. You log in as a CouchDB user, and the page reads and changes what this user may.
    The page is live, and reads nothing while no browser shows it.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise click.ClickException(f"this command needs the package {missing[0]}: pip install 'celery-couchdb[web]'")
    host, port = address
    if no_login and trust_header:
        raise click.UsageError('Give --no-login or --trust-header, not both: the header says who sends a request.')
    if no_login and not _is_loopback(host):
        raise click.UsageError(
            f'--no-login is for this machine alone: listen on 127.0.0.1, not on {host or "every interface"}, or let '
            f'users log in.'
        )
    if url_prefix and not (url_prefix.startswith('/') and url_prefix.strip('/')):
        raise click.UsageError('--url-prefix must be a path that starts with a slash, such as /celery.')
    from . import create_app

    page = create_app(
        app_of(ctx),
        read_only=read_only,
        mask_args=mask_args,
        login=not no_login,
        trust_header=trust_header,
        reader_role=reader_role,
    )
    prefix = url_prefix.rstrip('/')
    _serve(Prefixed(page, prefix) if prefix else page, host, port, prefix)


def _is_loopback(host: str) -> bool:
    return host in ('127.0.0.1', '::1', 'localhost')


def _serve(page: ASGIApp, host: str, port: int, prefix: str) -> None:
    import uvicorn

    config = uvicorn.Config(
        page,
        log_level='warning',
        access_log=False,
        server_header=False,
        lifespan='off',
        timeout_graceful_shutdown=1,  # open pages wait for changes, and would never end
    )
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=config.backlog)
    except OSError as exc:
        raise click.ClickException(f'cannot listen on {host}:{port}: {exc.strerror or exc}') from None
    own_host, own_port = map(str, listening.getsockname()[:2])
    shown = f'[{own_host}]' if ':' in own_host else own_host
    echo(f'The page is at http://{shown}:{own_port}{prefix}/', err=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn raises the signal again when all has ended
    try:
        uvicorn.Server(config).run([listening])
    except KeyboardInterrupt:
        pass


class Prefixed:
    """An ASGI application below a path, whether the proxy in front of it removes the path or not."""

    def __init__(self, page: ASGIApp, prefix: str) -> None:
        self._page, self._prefix = page, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope['type'] in ('http', 'websocket'):
            path: Any = scope['path']
            if path != self._prefix and not path.startswith(f'{self._prefix}/'):
                path = self._prefix + path
            scope = {**scope, 'root_path': self._prefix, 'path': path if path != self._prefix else f'{path}/'}
        await self._page(scope, receive, send)
