"""Command line of the chaos suite, `python -m tests.chaos`: options, progress and result."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from kombu_couchdb.embedded import EmbeddedServer

from .faults import faults_of
from .plan import plan
from .report import complaints, faults_table, verdicts_table
from .run import UNDER_WAY, run
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
@click.option(
    '--acks',
    type=click.Choice(['mixed', 'late', 'early']),
    default='mixed',
    show_default=True,
    help='How tasks are acknowledged; mixed: 8 % of the orders early.',
)
@click.option('--confirm-results', is_flag=True, help='Set the result backend option confirm_results: no pipelining.')
@click.option('--prefetch-multiplier', type=click.IntRange(1), help="The workers' worker_prefetch_multiplier.")
@click.option(
    '--set',
    'settings',
    nargs=2,
    multiple=True,
    metavar='NAME JSON',
    help='A setting of Celery for all processes; a dictionary is merged into that of the suite. Repeatable.',
)
@click.option(
    '--under-way', type=click.IntRange(1), default=UNDER_WAY, show_default=True, help='The number of tasks sent ahead.'
)
@click.option('--start-server', help='The command that starts the server and returns when it responds.')
@click.option('--stop-server', help='The command that stops the server; its data must stay.')
@click.option('--kill-server', help='The command that kills the server.')
@click.option('--pause-server', help='The command that pauses the server.')
@click.option('--resume-server', help='The command that makes a paused server continue.')
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
    acks: str,
    confirm_results: bool,
    prefetch_multiplier: int | None,
    settings: tuple[tuple[str, str], ...],
    under_way: int,
    start_server: str | None,
    stop_server: str | None,
    kill_server: str | None,
    pause_server: str | None,
    resume_server: str | None,
    patience: float,
    output: Path,
) -> None:
    """Run workers while faults happen, and check that no task is lost or runs twice without a reason."""
    url = os.environ.get('COUCHDB_URL')
    if (stop_server or kill_server) and not (start_server and url):
        raise click.UsageError(
            '--stop-server and --kill-server need --start-server and COUCHDB_URL, to start the server again'
        )
    if bool(pause_server) != bool(resume_server):
        raise click.UsageError('--pause-server and --resume-server need each other')
    changes = changed(acks, confirm_results, prefetch_multiplier, settings)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up then, too
    kinds = faults_of(stopping=bool(stop_server), killing=bool(kill_server), pausing=bool(pause_server))
    verdicts: dict[str, Verdict] = {}
    with ExitStack() as stack:
        server = Server(
            url or stack.enter_context(EmbeddedServer()).url,
            start_server,
            stop_server,
            kill_server,
            pause_server,
            resume_server,
        )
        for seed in seeds or (random.randrange(1_000_000),):
            folder, started = output / f'{seed}-{time.strftime("%H%M%S")}', time.monotonic()
            tell(f'seed {seed}; ledger and logs are in {folder}')
            spans = {name: kind.span for name, kind in kinds.items()}
            planned = plan(seed, tasks, faults, spans, early=acks != 'late')
            with Site(server, folder, changes) as site:
                verdicts[f'Seed {seed}'] = verdict = run(planned, site, kinds, patience, tell, under_way)
            tell(f'done in {time.monotonic() - started:.0f} s\n{complaints(verdict)}')
    click.echo(f'{verdicts_table(verdicts)}\n\n{faults_table(verdicts)}')
    sys.exit(not all(verdict.holds for verdict in verdicts.values()))


def changed(
    acks: str, confirm_results: bool, prefetch_multiplier: int | None, settings: Iterable[tuple[str, str]]
) -> dict[str, Any]:
    """Return the settings of Celery that the options change; *raises* `click.UsageError` for bad JSON."""
    changes: dict[str, Any] = {}
    for name, value in settings:
        try:
            changes[name] = json.loads(value)
        except ValueError as exc:
            raise click.UsageError(f'the value of --set {name} is not JSON: {exc}') from exc
    if acks == 'early':
        changes['task_acks_late'] = False
    if prefetch_multiplier is not None:
        changes['worker_prefetch_multiplier'] = prefetch_multiplier
    if confirm_results:
        options = changes.get('result_backend_transport_options', {})
        changes['result_backend_transport_options'] = {**options, 'confirm_results': True}
    return changes


def tell(text: str) -> None:
    """Print a line of progress to standard error."""
    click.echo(f'{time.strftime("%H:%M:%S")} {text}', err=True)


if __name__ == '__main__':
    main()
