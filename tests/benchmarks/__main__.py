"""Command line of the benchmarks, `python -m tests.benchmarks`: options, progress and report."""

from __future__ import annotations

import platform
import signal
import time
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

import click

from .cases import Case, Results
from .measures import MEASURES
from .report import Run, write
from .run import run
from .sizes import SIZES
from .systems import NAMES, reachable


@click.command(
    epilog='The URLs of the servers come from COUCHDB_URL, REDIS_URL, POSTGRES_URL and RABBITMQ_URL; the default is '
    'localhost. REDIS_ALWAYS_URL is a Redis with the settings `appendonly yes` and `appendfsync always`.'
)
@click.option('--quick', 'size', flag_value='quick', help='A check that everything works; about two minutes.')
@click.option('--full', 'size', flag_value='full', help='Large backlogs and more rounds; takes hours.')
@click.option(
    '--rounds',
    type=click.IntRange(1),
    help='The number of rounds, for all cases. By default what takes long is measured in the first round only.',
)
@click.option(
    '-m',
    '--measure',
    'measures',
    multiple=True,
    type=click.Choice(list(MEASURES)),
    help='Run this measure only; repeatable.',
)
@click.option(
    '-s', '--system', 'names', multiple=True, type=click.Choice(NAMES), help='Measure this system only; repeatable.'
)
@click.option(
    '--output',
    type=click.Path(file_okay=False, path_type=Path),
    help='The folder for costs.rst and performance.svg.  [default: docs/development; with --quick build]',
)
def main(
    size: str | None, rounds: int | None, measures: tuple[str, ...], names: tuple[str, ...], output: Path | None
) -> None:
    """Measure the transport and the result backend beside other brokers of kombu and bare CouchDB."""
    chosen = SIZES[size or 'default']
    systems, absent = reachable(names or NAMES)
    for name, reason in absent.items():
        tell(f'{name} is left out: {reason}')
    if not systems:
        raise click.ClickException(
            'no system can be reached; set COUCHDB_URL, for example to http://user:password@host:5984'
        )
    wanted = {
        name: measure for name, measure in MEASURES.items() if name in (measures or set(MEASURES) - chosen.skipped)
    }
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up and report then, too
    started = time.monotonic()
    cases: list[Case] = [case for measure in wanted.values() for case in measure.cases(chosen)]
    if rounds:
        cases = [replace(case, rounds=None) for case in cases]
    rounds, results = rounds or chosen.rounds, Results()
    try:
        run(cases, systems, rounds, results, lambda text: tell(f'{elapsed(started)} {text}'))
    except KeyboardInterrupt:
        tell('interrupted: the report contains what was measured so far')
    versions = {
        'Python': platform.python_version(),
        'kombu': version('kombu'),
        'Celery': version('celery'),
        **{system.server: found for system, found in systems.items()},
    }
    done = Run(
        date.today(),
        size or 'default',
        rounds,
        versions,
        {system.name: system.title for system in systems},
        absent,
        {name: measure.TITLE for name, measure in MEASURES.items()},
    )
    for path in write(done, results, output or Path('build' if size == 'quick' else 'docs/development')):
        tell(f'{elapsed(started)} written: {path}')


def tell(text: str) -> None:
    """Print a line of progress to standard error."""
    click.echo(text, err=True)


def elapsed(since: float) -> str:
    """Return the time since `since` (monotonic clock) as minutes:seconds."""
    return '{}:{:02}'.format(*divmod(int(time.monotonic() - since), 60))


if __name__ == '__main__':
    main()
