"""Regions while links, workers and servers fail, `python -m tests.chaos.regions`: is anything lost, or run twice?

Each region sends tasks to all regions, itself included, and waits for their results. Links between regions are cut or
swallow everything, workers are killed, and servers too if there are commands for that. `verdict` judges the ledger as
for the chaos suite; a result counts only in the region that sent the task.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from kombu_couchdb.contrib.regions.region import ANY

from .faults.base import Fault
from .faults.regions import LINK_FAULTS, DocumentsRefused, LinkFault, RegionServerKilled
from .faults.workers import WorkerKilled, WorkerPaused
from .ledger import Ledger, Progress
from .machine import pauses_noted
from .region_orders import Order, planned_orders
from .region_results import Results
from .region_site import NAMES, Regions, RegionSite
from .report import complaints, faults_table, verdicts_table
from .server import Server
from .verdict import Verdict

__all__ = ['cut_off', 'planned', 'run']

#: The maximum number of faults at the same time.
_AT_ONCE = 5

#: The pause between two looks, in seconds.
_LOOK = 0.1


def run(
    regions: Regions,
    orders: Sequence[Order],
    faults: Sequence[tuple[type[Fault], int, float]],
    patience: float,
    tell: Any,
) -> Verdict:
    """Send orders while the faults happen, each a kind, a target and a time in seconds; wait, and return the verdict.

    As many orders are sent as faults are over, in proportion, so that faults happen while there is work. Give up after
    `patience` seconds without progress.
    """
    progress, troubles, done = Progress(regions.ledger), list[str](), [0]

    def allowed() -> float:
        return len(orders) * (done[0] + 1) / (len(faults) + 1)

    with pauses_noted(regions.ledger), Results(regions) as results:
        senders = _senders(regions, orders, allowed, results)
        slots = threading.Semaphore(_AT_ONCE)
        strikes = [
            threading.Thread(target=_strike, args=(kind(regions, target), seconds, progress, slots, done, troubles))  # type: ignore[arg-type]
            for kind, target, seconds in faults
        ]
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
        remains = _settle(regions, results, progress, patience)
        tell(f'all faults are over; everything was worked off {time.monotonic() - healed_at:.1f} s later')
        verdict = results.judged(progress)
    verdict.remains += troubles + remains
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


def _senders(
    regions: Regions, orders: Sequence[Order], allowed: Callable[[], float], results: Results
) -> list[threading.Thread]:
    """Start and return a thread for each region that sends its share of the orders."""
    senders = [
        threading.Thread(target=_send, args=(region, orders, allowed, results), daemon=True) for region in regions.all
    ]
    for sender in senders:
        sender.start()
    return senders


def _send(home: RegionSite, orders: Sequence[Order], allowed: Callable[[], float], results: Results) -> None:
    """Send the orders of one region, as soon as that many are allowed, and cancel some of them."""
    cancels = list[threading.Timer]()
    for number, order in enumerate(orders):
        if order.home != home.name:
            continue
        while number >= allowed():
            time.sleep(_LOOK)
        keys = order.accepted(home)
        results.expect(home, order, keys)
        if order.is_cancelled:
            cancels.append(threading.Timer(order.delay, order.cancel, (home, keys)))
            cancels[-1].start()
    for cancel in cancels:
        cancel.join()


def _settle(regions: Regions, results: Results, progress: Progress, patience: float) -> list[str]:
    """Wait until all tasks have ended, their results have returned and nothing is left; return what remains."""
    seen: object = None
    since = time.monotonic()
    while True:
        progress.update()
        missing = results.missing()
        excused = results.excused(progress) if missing else set()
        missing -= excused
        remains = regions.remains(excused)
        if not missing and not remains:
            return []
        if (now := (len(progress.events), len(missing), len(remains))) != seen:
            seen = now
            since = time.monotonic()
        elif time.monotonic() - since > patience:
            return [*remains, *(f'the result of {key} has not returned' for key in sorted(missing)[:20])]
        time.sleep(_LOOK * 10)


def cut_off(
    regions: Regions, orders: Sequence[Order], seconds: float, silent: bool, patience: float, tell: Any
) -> tuple[int, float]:
    """Cut the first region off while all regions send orders. Return the number of tasks, and the seconds to catch up.

    If it is `silent`, nothing is refused, and nothing passed on.
    """
    progress, links = Progress(regions.ledger), regions.links_of(regions.all[0].name)
    proxies = [proxy for link in links for proxy in link.proxies]
    for proxy in proxies:
        proxy.hang() if silent else proxy.refuse()
    over = time.monotonic() + seconds

    def allowed() -> float:
        return len(orders) * (1 - (over - time.monotonic()) / seconds)

    with Results(regions) as results:
        for sender in _senders(regions, orders, allowed, results):
            sender.join()
        progress.update()
        tell(f'{len(progress.ended)} of {len(progress.accepted)} tasks have ended while {links[0].to.name} was cut off')
        for proxy in proxies:
            proxy.forget() if silent else proxy.restore()
        restored = time.monotonic()
        if remains := _settle(regions, results, progress, patience):
            raise RuntimeError('; '.join(remains[:5]))
        return len(progress.accepted), time.monotonic() - restored


@click.command(
    epilog='REGION_URLS has the URLs of the servers, separated by commas; with one URL all regions are on that server. '
    'The nodes of a cluster are separated by semicolons. In the commands, {n} is the number of the server, from 1.'
)
@click.option('--seed', type=int, help='The seed of orders and faults.  [default: random]')
@click.option('--tasks', default=5000, show_default=True, help='The number of tasks to send.')
@click.option('--links', default=30, show_default=True, help='How often a link, or all links of a region, are broken.')
@click.option('--workers', default=8, show_default=True, help='How often a worker is killed.')
@click.option('--pauses', default=4, show_default=True, help='How often a worker is paused for longer than its lease.')
@click.option('--refusals', default=4, show_default=True, help='How often a region refuses some documents.')
@click.option('--servers', default=0, show_default=True, help='How often a server is killed.')
@click.option('--longest', default=60.0, show_default=True, help='The longest time that a link is broken, in seconds.')
@click.option('--kill-server', help='The command that kills a server.')
@click.option('--start-server', help='The command that starts a server and returns when it responds.')
@click.option('--cut', type=float, help='Only cut the first region off for so many seconds, and measure its return.')
@click.option('--silent', is_flag=True, help='With --cut: nothing is refused, and nothing passed on.')
@click.option('--patience', default=300.0, show_default=True, help='Give up after this many seconds without progress.')
@click.option(
    '--output', default='build/chaos', type=click.Path(file_okay=False, path_type=Path), help='The folder of the logs.'
)
def main(
    seed: int | None,
    tasks: int,
    links: int,
    workers: int,
    pauses: int,
    refusals: int,
    servers: int,
    longest: float,
    kill_server: str | None,
    start_server: str | None,
    cut: float | None,
    silent: bool,
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
    nodes = _servers(urls, start_server, kill_server)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up then, too
    folder = output / f'regions-{seed}-{time.strftime("%H%M%S")}'
    tell(f'seed {seed}; ledger and logs are in {folder}')
    with Regions(nodes * (len(NAMES) // len(nodes)), folder) as regions:
        orders = planned_orders(seed, tasks, NAMES)
        if cut is not None:
            count, seconds = cut_off(regions, orders, cut, silent, patience, tell)
            tell(f'cut off for {cut:g} s: all of {count} tasks and results were there {seconds:.1f} s after its return')
            return
        verdict = run(
            regions, orders, planned(seed, links, workers, pauses, refusals, servers, longest), patience, tell
        )
        for line in _kinds(regions):
            tell(line)
    tell(f'finished\n{complaints(verdict)}')
    verdicts = {f'Seed {seed}': verdict}
    click.echo(f'{verdicts_table(verdicts)}\n\n{faults_table(verdicts)}')
    sys.exit(not verdict.holds)


def _servers(urls: Sequence[str], start: str | None, kill: str | None) -> list[list[Server]]:
    """Return the servers of each region, with the commands for each."""
    found, number = list[list[Server]](), 0
    for region in urls:
        found.append([])
        for url in region.split(';'):
            number += 1
            commands = [command and command.replace('{n}', str(number)) for command in (start, kill)]
            found[-1].append(Server(url, starting=commands[0], killing=commands[1]))
    return found


def _kinds(regions: Regions) -> list[str]:
    """Return lines that say how many tasks of each kind there were, and how many ran elsewhere."""
    progress = Progress(Ledger(regions.ledger.path))
    progress.update()
    ran_in: Mapping[str, str] = {
        event['key']: event['worker'].partition('.')[0] for event in progress.events if event['event'] == 'start'
    }
    accepted = [event for event in progress.events if event['event'] == 'accepted']
    count, elsewhere = Counter[str](), Counter[str]()
    for event in accepted:
        for key, to in zip(event['keys'], event['to'], strict=True):
            count[event['kind']] += 1
            named = key.partition('-')[0] if to == ANY else to
            elsewhere[event['kind']] += ran_in.get(key, named) != named
    count['revoked'] = sum(event['event'] == 'revoked' for event in progress.events)
    return [f'{kind}: {count[kind]} tasks, {elsewhere[kind]} ran elsewhere' for kind in sorted(count)]


def planned(
    seed: int, links: int, workers: int, pauses: int, refusals: int, servers: int, longest: float
) -> list[tuple[type[Fault], int, float]]:
    """Return the faults in random order: kind, target, and length in seconds."""
    dice = random.Random(seed)
    kinds: list[type[Fault]] = [LINK_FAULTS[number % len(LINK_FAULTS)] for number in range(links)]
    kinds += [WorkerKilled] * workers + [WorkerPaused] * pauses + [DocumentsRefused] * refusals
    kinds += [RegionServerKilled] * servers
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
