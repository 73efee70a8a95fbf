"""`python -m benchmarks`: the options, the progress, and where the report goes."""

from __future__ import annotations

import platform
import signal
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import click

from .cases import Results
from .measures import MEASURES
from .report import Run, write
from .run import run
from .sizes import SIZES
from .systems import NAMES, reachable


@click.command(
    epilog='Servers are taken from COUCHDB_URL, REDIS_URL, POSTGRES_URL and RABBITMQ_URL, or else looked for on '
    'localhost.'
)
@click.option('--quick', 'size', flag_value='quick', help='About a minute: to see that it works.')
@click.option('--full', 'size', flag_value='full', help='Large backlogs and more rounds; hours.')
@click.option('--rounds', type=click.IntRange(1), help='How often each case is repeated.')
@click.option(
    '-m', '--measure', 'measures', multiple=True, type=click.Choice(list(MEASURES)), help='Only this; repeatable.'
)
@click.option('-s', '--system', 'names', multiple=True, type=click.Choice(NAMES), help='Only this; repeatable.')
@click.option(
    '--output',
    type=click.Path(file_okay=False, path_type=Path),
    help='The folder for performance.rst and performance.svg.  [default: docs/production; with --quick build]',
)
def main(
    size: str | None, rounds: int | None, measures: tuple[str, ...], names: tuple[str, ...], output: Path | None
) -> None:
    """Measure the transport and the result backend beside kombu's other brokers and bare CouchDB."""
    chosen = SIZES[size or 'default']
    rounds = rounds or chosen.rounds
    systems, absent = reachable(names or NAMES)
    for name, reason in absent.items():
        tell(f'{name} is left out: {reason}')
    if not systems:
        raise click.ClickException('no system can be reached; set COUCHDB_URL to http://user:password@host:5984')
    wanted = {
        name: measure for name, measure in MEASURES.items() if name in (measures or set(MEASURES) - chosen.skipped)
    }
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # tidy up and report then, too
    started = time.monotonic()
    cases, results = [case for measure in wanted.values() for case in measure.cases(chosen)], Results()
    try:
        run(cases, systems, rounds, results, lambda text: tell(f'{elapsed(started)} {text}'))
    except KeyboardInterrupt:
        tell('interrupted: the report has what was measured so far')
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
        {name: measure.TITLE for name, measure in wanted.items()},
    )
    for path in write(done, results, output or Path('build' if size == 'quick' else 'docs/production')):
        tell(f'{elapsed(started)} written: {path}')


def tell(text: str) -> None:
    """Show progress."""
    click.echo(text, err=True)


def elapsed(since: float) -> str:
    """Return how long it is since a time of the monotonic clock, as minutes and seconds."""
    return '{}:{:02}'.format(*divmod(int(time.monotonic() - since), 60))


if __name__ == '__main__':
    main()
