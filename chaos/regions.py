"""Regions while links, workers and servers fail, `python -m chaos.regions`: is anything lost, or run twice?

Each region sends tasks to all regions, itself included. Links between regions are cut or swallow everything, workers
are killed, and servers too if there are commands for that. `verdict` judges the ledger as for the chaos suite; a result
counts only in the region that sent the task.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from .faults.base import Fault
from .faults.regions import LinkCut, LinkFault, LinkHangs, RegionServerKilled
from .faults.workers import WorkerKilled
from .ledger import Progress
from .machine import pauses_noted
from .region_site import NAMES, Regions
from .report import complaints, faults_table, verdicts_table
from .server import Server
from .verdict import Verdict, judge

__all__ = ['cut_off', 'run']

#: The maximum number of faults at the same time, and the pause between two looks, in seconds.
_AT_ONCE, _LOOK = 5, 0.1


def run(
    regions: Regions,
    tasks: int,
    faults: Sequence[tuple[type[Fault], int, float]],
    patience: float,
    tell: Any,
    acks: str = 'late',
) -> Verdict:
    """Send tasks while the faults happen, each a kind, a target and a time in seconds; wait, and return the verdict.

    As many tasks are sent as faults are over, in proportion, so that faults happen while there is work. The tasks are
    acknowledged `late` or `early`. Give up after `patience` seconds without progress.
    """
    progress, troubles, done = Progress(regions.ledger), list[str](), [0]

    def allowed() -> float:
        return tasks * (done[0] + 1) / (len(faults) + 1)

    with pauses_noted(regions.ledger):
        senders = [
            threading.Thread(target=_send, args=(regions, index, tasks, allowed, acks), daemon=True)
            for index in range(len(regions.all))
        ]
        slots = threading.Semaphore(_AT_ONCE)
        strikes = [
            threading.Thread(target=_strike, args=(kind(regions, target), seconds, progress, slots, done, troubles))  # type: ignore[arg-type]
            for kind, target, seconds in faults
        ]
        for sender in senders:
            sender.start()
        for (kind, _, seconds), strike in zip(faults, strikes, strict=True):
            slots.acquire()
            progress.update()
            tell(
                f'{len(progress.ended)} of {len(progress.accepted)} tasks have ended; now: {kind.name} ({seconds:g} s)'
            )
            strike.start()
        for thread in [*strikes, *senders]:
            thread.join()
        healed_at = time.monotonic()
        remains = _settle(regions, progress, patience)
    tell(f'all faults are over; everything was worked off {time.monotonic() - healed_at:.1f} s later')
    regions.ledger.note('stored', keys=regions.stored(sorted(progress.accepted)))
    progress.update()
    verdict = judge(progress.events)
    verdict.remains = troubles + remains
    return verdict


def _strike(
    fault: Fault, seconds: float, progress: Progress, slots: threading.Semaphore, done: list[int], troubles: list[str]
) -> None:
    try:
        fault.happen(seconds, progress.children)
    except Exception as exc:
        troubles.append(f'the fault "{fault.name}" failed: {exc!r}')
    finally:
        done[0] += 1
        slots.release()


def _send(regions: Regions, index: int, tasks: int, allowed: Callable[[], float], acks: str = 'late') -> None:
    """Send the share of one region, in turn to all regions."""
    own, count = regions.all[index], len(regions.all)
    for number in range(index, tasks, count):
        while number >= allowed():
            time.sleep(_LOOK)
        to = regions.all[(number // count) % count].name
        for again in range(1000):
            key = f'{own.name}-{number}-{again}-{to}'
            try:
                own.app.send_task(acks, (0.01,), task_id=key, region=to)
            except own.app.connection_for_write().recoverable_connection_errors:
                continue  # it may have been sent all the same: the next attempt uses another id
            early = acks == 'early'
            regions.ledger.note('accepted', order=key, kind=acks, keys=[key], tries=1, early=early, results=True)
            break


def _settle(regions: Regions, progress: Progress, patience: float) -> list[str]:
    """Wait until all tasks have ended, their results have returned and nothing is left; return what remains."""
    seen, since = None, time.monotonic()
    while True:
        progress.update()
        stored, remains = regions.stored(sorted(progress.accepted)), regions.remains()
        if missing := progress.accepted - set(stored):
            excused = judge([*progress.events, {'event': 'stored', 'keys': stored}])
            missing -= {*excused.at_most_once, *excused.results_at_most_once}
        if not missing and not remains:
            return []
        if (now := (len(progress.events), len(missing), len(remains))) != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > patience:
            return [*remains, *(f'the result of {key} has not returned' for key in sorted(missing)[:20])]
        time.sleep(_LOOK)


def cut_off(regions: Regions, seconds: float, patience: float, tell: Any) -> tuple[int, float]:
    """Cut the first region off while all regions send tasks. Return their number, and the seconds to catch up."""
    progress, links = Progress(regions.ledger), regions.links_of(regions.all[0].name)
    over, share = time.monotonic() + seconds, len(regions.all) ** 2
    for link in links:
        link.proxy.refuse()
    tasks = int(seconds) * share
    senders = [
        threading.Thread(
            target=_send,
            args=(regions, index, tasks, lambda: tasks * (1 - (over - time.monotonic()) / seconds)),
            daemon=True,
        )
        for index in range(len(regions.all))
    ]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    progress.update()
    tell(f'{len(progress.ended)} of {len(progress.accepted)} tasks have ended while {regions.all[0].name} was cut off')
    for link in links:
        link.proxy.restore()
        if LinkFault.nudge:
            link.write()
    restored = time.monotonic()
    if remains := _settle(regions, progress, patience):
        raise RuntimeError('; '.join(remains[:5]))
    return len(progress.accepted), time.monotonic() - restored


@click.command(
    epilog='REGION_URLS has the URLs of the servers, separated by commas; with one URL all regions are on that server. '
    'In the commands, {n} is the number of the server, from 1.'
)
@click.option('--seed', type=int, help='The seed of the faults.  [default: random]')
@click.option('--tasks', default=5000, show_default=True, help='The number of tasks to send.')
@click.option('--links', default=30, show_default=True, help='How often a link, or all links of a region, are broken.')
@click.option('--workers', default=6, show_default=True, help='How often a worker is killed.')
@click.option('--servers', default=0, show_default=True, help='How often a server is killed.')
@click.option('--longest', default=60.0, show_default=True, help='The longest time that a link is broken, in seconds.')
@click.option('--kill-server', help='The command that kills a server.')
@click.option('--start-server', help='The command that starts a server and returns when it responds.')
@click.option('--nudge/--no-nudge', default=True, show_default=True, help='Write replications again after a fault.')
@click.option('--acks', default='late', show_default=True, type=click.Choice(['late', 'early']), help='Of all tasks.')
@click.option('--cut', type=float, help='Only cut the first region off for so many seconds, and measure its return.')
@click.option('--patience', default=300.0, show_default=True, help='Give up after this many seconds without progress.')
@click.option(
    '--output', default='build/chaos', type=click.Path(file_okay=False, path_type=Path), help='The folder of the logs.'
)
def main(
    seed: int | None,
    tasks: int,
    links: int,
    workers: int,
    servers: int,
    longest: float,
    kill_server: str | None,
    start_server: str | None,
    nudge: bool,
    acks: str,
    cut: float | None,
    patience: float,
    output: Path,
) -> None:
    """Run three regions while links, workers and servers fail, and check that nothing is lost or runs twice."""
    urls = os.environ.get('REGION_URLS', os.environ.get('COUCHDB_URL', '')).split(',')
    if not urls[0] or len(urls) not in (1, len(NAMES)):
        raise click.UsageError(f'REGION_URLS must have one URL or {len(NAMES)}')
    if servers and not (kill_server and start_server and len(urls) > 1):
        raise click.UsageError('--servers needs --kill-server, --start-server and a URL for each region')
    seed = random.randrange(1_000_000) if seed is None else seed
    LinkFault.nudge = nudge
    places = [
        Server(
            url,
            starting=start_server and start_server.replace('{n}', str(number)),
            killing=kill_server and kill_server.replace('{n}', str(number)),
        )
        for number, url in enumerate(urls, 1)
    ]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up then, too
    folder = output / f'regions-{seed}-{time.strftime("%H%M%S")}'
    tell(f'seed {seed}; ledger and logs are in {folder}')
    with Regions(places * (len(NAMES) // len(places)), folder) as regions:
        if cut is not None:
            count, seconds = cut_off(regions, cut, patience, tell)
            tell(f'cut off for {cut:g} s: all of {count} tasks and results were there {seconds:.1f} s after its return')
            return
        verdict = run(regions, tasks, planned(seed, links, workers, servers, longest), patience, tell, acks)
    tell(f'finished\n{complaints(verdict)}')
    verdicts = {f'Seed {seed}': verdict}
    click.echo(f'{verdicts_table(verdicts)}\n\n{faults_table(verdicts)}')
    sys.exit(not verdict.holds)


def planned(seed: int, links: int, workers: int, servers: int, longest: float) -> list[tuple[type[Fault], int, float]]:
    """Return the faults in random order: kind, target, and length in seconds."""
    dice = random.Random(seed)
    kinds: list[type[Fault]] = [(LinkCut, LinkHangs)[number % 2] for number in range(links)]
    kinds += [WorkerKilled] * workers + [RegionServerKilled] * servers
    dice.shuffle(kinds)
    found = []
    for kind in kinds:
        low, high = kind.span
        seconds = dice.uniform(low, longest if issubclass(kind, LinkFault) else high)
        found.append((kind, dice.randrange(1000), round(seconds, 1)))
    return found


def tell(text: str) -> None:
    """Print a line of progress to standard error."""
    click.echo(f'{time.strftime("%H:%M:%S")} {text}', err=True)


if __name__ == '__main__':
    main()
