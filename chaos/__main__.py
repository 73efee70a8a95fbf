"""Command line of the chaos suite, `python -m chaos`: options, progress and result."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import click

from kombu_couchdb.embedded import EmbeddedServer

from .faults import faults_of
from .plan import plan
from .report import complaints, faults_table, verdicts_table
from .run import run
from .server import Server
from .site import Site
from .verdict import Verdict


@click.command(
    epilog='The server is the one in COUCHDB_URL, for example http://user:password@host:5984, or else an embedded one. '
    'It is stopped and killed only if the options give commands for that; otherwise only the network fails.'
)
@click.option('--seed', 'seeds', multiple=True, type=int, help='The seed of the plan; repeatable.  [default: random]')
@click.option('--tasks', default=10_000, show_default=True, help='The number of tasks to send, at least.')
@click.option('--faults', default=100, show_default=True, help='The number of faults.')
@click.option('--start-server', help='The command that starts the server and returns when it responds.')
@click.option('--stop-server', help='The command that stops the server; its data must stay.')
@click.option('--kill-server', help='The command that kills the server.')
@click.option('--patience', default=300.0, show_default=True, help='Give up after this many seconds without progress.')
@click.option(
    '--output',
    default='build/chaos',
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help='The folder for ledgers and logs.',
)
def main(
    seeds: tuple[int, ...],
    tasks: int,
    faults: int,
    start_server: str | None,
    stop_server: str | None,
    kill_server: str | None,
    patience: float,
    output: Path,
) -> None:
    """Run workers while faults happen, and check that no task is lost or runs twice without a reason."""
    url = os.environ.get('COUCHDB_URL')
    if (stop_server or kill_server) and not (start_server and url):
        raise click.UsageError(
            '--stop-server and --kill-server need --start-server and COUCHDB_URL, to start the server again'
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up then, too
    kinds = faults_of(stopping=bool(stop_server), killing=bool(kill_server))
    verdicts: dict[str, Verdict] = {}
    with ExitStack() as stack:
        server = Server(url or stack.enter_context(EmbeddedServer()).url, start_server, stop_server, kill_server)
        for seed in seeds or (random.randrange(1_000_000),):
            folder, started = output / f'{seed}-{time.strftime("%H%M%S")}', time.monotonic()
            tell(f'seed {seed}; ledger and logs are in {folder}')
            planned = plan(seed, tasks, faults, {name: kind.span for name, kind in kinds.items()})
            with Site(server, folder) as site:
                verdicts[f'Seed {seed}'] = verdict = run(planned, site, kinds, patience, tell)
            tell(f'done in {time.monotonic() - started:.0f} s\n{complaints(verdict)}')
    click.echo(f'{verdicts_table(verdicts)}\n\n{faults_table(verdicts)}')
    sys.exit(not all(verdict.holds for verdict in verdicts.values()))


def tell(text: str) -> None:
    """Print a line of progress to standard error."""
    click.echo(f'{time.strftime("%H:%M:%S")} {text}', err=True)


if __name__ == '__main__':
    main()
