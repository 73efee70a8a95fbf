"""The ablation: what each adaptive mechanism gains, `make ablation`. It runs on Apache CouchDB, at $COUCHDB_URL.

Each mechanism in `without` is switched off in turn, and the cases that it may matter to are measured beside the same
cases with all mechanisms on. A round measures `on` first, then each mechanism. The table has medians of the rounds.
Each measurement is a new process, which adds a line to a file: several runs together make one table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from uuid import uuid4

import click
from celery import Celery, chain, chord, group

from . import loops, peers, sending
from .figures import percentile
from .fleet import fleet
from .processes import Spent, cpu_of
from .systems import System
from .systems.couchdb import CouchDB
from .without import MECHANISMS
from .worker import app_of, working

#: A figure that differs by less than this part is no gain.
_GAIN = 0.1
_PATIENCE = 120.0
#: How long the server and the worker may still work after the last task, in seconds.
_REST = 0.5
_TASK_SECONDS = 0.2

Figures = dict[str, float]


@contextmanager
def _cost(system: System, title: str, number: int, found: Figures) -> Iterator[None]:
    """Add the milliseconds and the requests of each of `number` tasks that the block runs."""
    spent, before, own, began = (
        Spent(system.host, system.port), system.requests() or 0, cpu_of(os.getpid()), time.monotonic()
    )  # fmt: skip
    yield
    found[f'{title}: ms'] = (time.monotonic() - began) * 1000 / number
    time.sleep(_REST)
    found[f'{title}: server ms'] = (spent.milliseconds() or 0.0) / number
    found[f'{title}: our ms'] = (cpu_of(os.getpid()) - own) * 1000 / number
    found[f'{title}: requests'] = ((system.requests() or 0) - before) / number


def _tasks(system: System) -> Figures:
    """Tasks of a prefork worker with two processes."""
    found: Figures = {}
    with system.place() as place:
        app = app_of(place)
        with working(place, app):
            with _cost(system, 'one by one', 200, found):
                for result in [app.send_task('add', (number, 1)) for number in range(200)]:
                    result.get(timeout=_PATIENCE)
            with _cost(system, 'batch', 1500, found):
                results = sending.send(app, 'add', ((number, 1) for number in range(1500)))
                for result in results:
                    result.get(timeout=_PATIENCE)
            with _cost(system, 'group', 300, found):
                group(_adds(app, 300)).apply_async().get(timeout=_PATIENCE)
            with _cost(system, 'chord', 200, found):
                chord(_adds(app, 200))(app.signature('total')).get(timeout=_PATIENCE)
            with _cost(system, 'chains', 200, found):
                steps = [app.signature('add', (1,)) for _ in range(9)]
                for result in [chain(app.signature('add', (1, 1)), *steps, app=app).apply_async() for _ in range(20)]:
                    result.get(timeout=_PATIENCE)
            again = [app.AsyncResult(result.id) for result in results[:500]]
            with _cost(system, 'results that are there', 500, found):
                for result in again:
                    result.get(timeout=_PATIENCE)
        app.close()
    return found


def _uneven(system: System) -> Figures:
    """Short tasks, one in 30 of which takes half a second: claims ahead are given back again and again."""
    found: Figures = {}
    with system.place() as place:
        app = app_of(place)
        with working(place, app), _cost(system, 'uneven tasks', 900, found):
            calls: list[tuple[str, tuple[float, ...]]] = [
                ('add', (number, 1)) if number % 30 else ('nap', (0.5,)) for number in range(900)
            ]
            with app.producer_pool.acquire(block=True) as producer, producer.batch():
                results = [app.send_task(name, args, producer=producer, retry=False) for name, args in calls]
            for result in results:
                result.get(timeout=_PATIENCE)
        app.close()
    return found


def _adds(app: Celery, count: int) -> list[object]:
    return [app.signature('add', (number, 1)) for number in range(count)]


def _programs(number: int, tasks: int) -> Callable[[System], Figures]:
    """Programs that each send a task and wait for it, again and again."""

    def measure(system: System) -> Figures:
        found: Figures = {}
        title = f'{number} programs'
        with system.place() as place:
            app = app_of(place)
            with (
                working(place, app, number + 8, pool='threads'),
                peers.waiting(place, number, tasks, _TASK_SECONDS) as answer,
                _cost(system, title, number * tasks, found),
            ):
                waits, _ = answer()
            app.close()
        found[f'{title}: p50 beyond the task'] = (percentile(waits, 0.5) - _TASK_SECONDS) * 1000
        return found

    return measure


def _among_others(system: System) -> Figures:
    """Ten programs that wait for tasks of two seconds, while others store 200 results a second."""
    found: Figures = {}
    with system.place() as place:
        app, ended = app_of(place), threading.Event()

        def store() -> None:
            client = app.backend.store.client
            while not ended.wait(0.05):
                client.bulk([{'_id': f'celery-task-meta-{uuid4()}', 'type': 'Result'} for _ in range(10)])

        storing = threading.Thread(target=store)
        with working(place, app, 16, pool='threads'), peers.waiting(place, 10, 4, 2.0) as answer:
            storing.start()
            time.sleep(2.0)
            with _cost(system, 'programs among others', 40, found):
                waits, _ = answer()
            ended.set()
            storing.join()
        app.close()
    found['programs among others: p50 beyond the task'] = (percentile(waits, 0.5) - 2.0) * 1000
    return found


def _delays(system: System) -> Figures:
    """Messages that come one at a time, and among others: 50 in a second, each of which takes 5 ms."""
    found: Figures = {}
    for busy in (False, True):
        title = 'delay, flowing' if busy else 'delay, idle'
        with system.place() as place:
            sender = loops.sender(place)
            with (
                peers.listening(place, 8, 45, 0.005) as answer,
                peers.loading(place, 200, 50.0) if busy else nullcontext(),
                _cost(system, title, 45, found),
            ):
                for number in range(45):
                    time.sleep(0.03 + 0.06 * (number % 7) / 7)
                    sender.send({'sent': time.time()})
                delays = answer()[5:]
            sender.close()
        found[f'{title}: p50'], found[f'{title}: p90'] = (percentile(delays, share) * 1000 for share in (0.5, 0.9))
    return found


def _fleet(size: int) -> Callable[[System], Figures]:
    def measure(system: System) -> Figures:
        found: Figures = {}
        title = f'fleet of {size}'
        with system.place() as place, fleet(place, size, prefetch=1) as members:
            members.settle(1.0 + size / 20)
            spent = Spent(system.host, system.port)
            time.sleep(3.0)
            found[f'{title}, idle: server ms a second'] = (spent.milliseconds() or 0.0) / 3
            with _cost(system, f'{title}, idle', 10, found):
                delays = members.delays(10)
            found[f'{title}, idle: p50'] = percentile(delays, 0.5) * 1000
            with _cost(system, f'{title}, burst', size, found):
                members.send(size, 1.5)
                starts = members.received(size)
            found[f'{title}, burst: first to last'] = (starts[-1] - starts[0]) * 1000
            time.sleep(2.5)
            members.send(size - 1, 3600.0)
            members.received(size - 1)
            time.sleep(1.0)
            found[f'{title}, one free: first message'] = members.delays(1)[0] * 1000
            with _cost(system, f'{title}, one free', 10, found):
                delays = members.delays(10)
            found[f'{title}, one free: p50'] = percentile(delays, 0.5) * 1000
        with system.place() as place:
            sender = loops.sender(place)
            sender.send_all({'number': number, 'hold': 0.0} for number in range(1500))
            sender.settle()
            sender.close()
            with fleet(place, size, 64) as members, _cost(system, f'{title}, backlog', 1500, found):
                members.received(1500)
        return {name: value for name, value in found.items() if not (', idle: ms' in name or 'free: ms' in name)}

    return measure


CASES: Mapping[str, Callable[[System], Figures]] = {
    'tasks': _tasks,
    'uneven tasks': _uneven,
    '10 programs': _programs(10, 15),
    '40 programs': _programs(40, 8),
    'programs among others': _among_others,
    'delays': _delays,
    'fleet of 10': _fleet(10),
    'fleet of 100': _fleet(100),
}


@click.command()
@click.option('-w', '--without', 'names', multiple=True, type=click.Choice(list(MECHANISMS)), help='Repeatable.')
@click.option('-c', '--case', 'cases', multiple=True, type=click.Choice(list(CASES)), help='Repeatable.')
@click.option('--rounds', type=click.IntRange(0), default=3, show_default=True, help='0: print the table only.')
@click.option('--file', type=click.Path(dir_okay=False, path_type=Path), default=Path('build/ablation.jsonl'))
@click.option('--run', 'one', hidden=True, type=click.Choice(list(CASES)))
def main(names: tuple[str, ...], cases: tuple[str, ...], rounds: int, file: Path, one: str | None) -> None:
    """Measure what each adaptive mechanism gains, and print the table."""
    if one:
        click.echo(json.dumps(CASES[one](CouchDB(os.environ['COUCHDB_URL']))))
        return
    file.parent.mkdir(exist_ok=True)
    for _ in range(rounds):
        for case in cases or CASES:
            for name in ['', *(name for name in names or MECHANISMS if case in MECHANISMS[name].cases)]:
                began = time.monotonic()
                found = subprocess.run(
                    [sys.executable, '-m', __spec__.name, '--run', case],
                    env={**os.environ, 'BENCHMARK_WITHOUT': name},
                    stdout=subprocess.PIPE,
                    check=True,
                ).stdout
                with file.open('a') as lines:
                    lines.write(json.dumps({'case': case, 'without': name, 'figures': json.loads(found)}) + '\n')
                click.echo(
                    f'{case}, {"without " + name if name else "all on"}: {time.monotonic() - began:.0f} s', err=True
                )
    click.echo(table(file))


def table(file: Path) -> str:
    """Return the medians of the lines in a file: each figure with everything on, and its change without a mechanism."""
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in file.read_text().splitlines():
        run = json.loads(line)
        for figure, value in run['figures'].items():
            values[figure, run['without']].append(value)
    rows = []
    for figure in dict.fromkeys(figure for figure, _ in values):
        on = median(values[figure, ''] or [0.0])
        changes = {
            name: median(values[figure, name]) / on - 1 for name in MECHANISMS if on and (figure, name) in values
        }
        rows.append(
            f'{figure:45} {on:8.2f} '
            + ' '.join(f'{name} {change:+.0%}' for name, change in changes.items() if abs(change) >= _GAIN)
        )
    return '\n'.join(rows)


if __name__ == '__main__':
    main()
