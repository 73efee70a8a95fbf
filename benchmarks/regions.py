"""Regions: the tables of the thesis, the delay of a hop, and the rate of parcels, `python -m benchmarks.regions`.

It needs a server for each region, REGION_URLS, and prints tables. The steps are `sleep 5`, so the load of the machine
matters little there; it matters for delays and rates.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import requests
from celery import chain, group

from chaos.region_site import Regions, RegionSite
from chaos.server import Server

from .figures import percentile
from .processes import Spent
from .table import simple_table

#: The duration of a step, and the longest wait for a result, in seconds.
_STEP, _PATIENCE = 5.0, 600.0

#: The seconds of rest before idle regions are measured, and the minutes of the measurement.
_REST, _IDLE_MINUTES = 100.0, 2

#: The least time for 6 jobs of 3 steps with two processes a region. 18 steps on four processes need five rounds.
_IDEAL = {1: '45 s', 2: '25 s', 3: '15 s'}


@click.command()
@click.option(
    '-m', '--measure', 'chosen', multiple=True, type=click.Choice(['jobs', 'many', 'aba', 'hop', 'parcels', 'idle'])
)
@click.option('--parcels', default=20_000, show_default=True, help='The number of empty parcels.')
@click.option('--hops', default=200, show_default=True, help='The number of tasks for the delay of a hop.')
def main(chosen: tuple[str, ...], parcels: int, hops: int) -> None:
    """Measure regions."""
    servers = [Server(url) for url in os.environ['REGION_URLS'].split(',')]
    wanted = set(chosen or ('jobs', 'aba', 'hop', 'parcels', 'idle'))
    lines = [['', 'Regions', 'Measured', 'Ideal']]
    for count in (1, 2, 3) if wanted & {'jobs', 'many'} else ():
        with TemporaryDirectory() as folder, _started(servers[:count], Path(folder)) as regions:
            if 'jobs' in wanted:
                lines.append(['6 jobs of 3 steps', str(count), _seconds(_jobs(regions, 6)), _IDEAL[count]])
                click.echo(lines[-1])
            if 'many' in wanted and count == 3:
                lines.append(['90 jobs of 3 steps', str(count), _seconds(_jobs(regions, 90)), '225 s'])
                click.echo(lines[-1])
    if wanted & {'aba', 'hop', 'parcels', 'idle'}:
        with TemporaryDirectory() as folder, _started(servers[:2], Path(folder)) as regions:
            for line in _between_two(regions, wanted, hops, parcels):
                click.echo(line)
                lines.append(line)
    click.echo(simple_table(lines))


def _started(servers: Sequence[Server], folder: Path) -> Regions:
    """Return regions whose workers have a pool of two processes."""
    changes = {
        'worker_prefetch_multiplier': 1,
        'broker_transport_options': {'visibility_timeout': 60.0, 'request_timeout': 20.0},
        'result_backend_transport_options': {'request_timeout': 20.0},
    }
    return Regions(servers, folder, changes, ('prefork', 2))


def _seconds(value: float) -> str:
    return f'{value:.1f} s'


def _warm_up(regions: Regions) -> None:
    """Wait until each process of each worker has run a task of each region."""
    results = [one.app.send_task('late', (0.2,), region=to.name) for one in regions.all for to in regions.all * 4]
    for result in results:
        result.get(timeout=_PATIENCE)


def _jobs(regions: Regions, jobs: int) -> float:
    """Return the seconds of jobs of three steps, whose steps are spread over the regions, all sent in the first one.

    Each step of a job names the next region, so that with several regions each step travels.
    """
    _warm_up(regions)
    home, began = regions.all[0], time.monotonic()
    results = [
        chain(
            home.app.signature('late', (_STEP,), immutable=True).set(
                region=regions.all[(job + step) % len(regions.all)].name
            )
            for step in range(3)
        ).apply_async()
        for job in range(jobs)
    ]
    for result in results:
        result.get(timeout=_PATIENCE)
    return time.monotonic() - began


def _between_two(regions: Regions, wanted: set[str], hops: int, parcels: int) -> Iterator[list[str]]:
    _warm_up(regions)
    one, two = regions.all
    if 'aba' in wanted:
        began = time.monotonic()
        steps = [one.app.signature('late', (_STEP,), immutable=True).set(region=r.name) for r in (one, two, one)]
        results = [chain(step.clone() for step in steps).apply_async() for _ in range(4)]
        for result in results:
            result.get(timeout=_PATIENCE)
        yield ['4 jobs A-B-A', '2', _seconds(time.monotonic() - began), '20 s']
    if 'hop' in wanted:
        yield from _hops(one, two, hops, regions)
    if 'parcels' in wanted:
        yield from _parcels(one, two, parcels, regions)
    if 'idle' in wanted:
        yield from _idle(regions)


def _hops(one: RegionSite, two: RegionSite, hops: int, regions: Regions) -> Iterator[list[str]]:
    """Yield the delay from before a task is sent in one region until it begins in the other, and until its result."""
    regions.ledger.new_events()
    sent, back = dict[str, float](), list[float]()
    with _Cost(regions) as cost:
        for _ in range(hops):
            before = time.monotonic()
            result = one.app.send_task('late', (0.0,), region=two.name)
            result.get(timeout=_PATIENCE)
            sent[str(result.id)] = before
            back.append(time.monotonic() - before)
    starts = [event['at'] - sent[event['key']] for event in regions.ledger.new_events() if event['event'] == 'start']
    for what, found in (('until it begins', starts), ('until the result is back', back)):
        for share in (0.5, 0.99):
            yield [f'a task, {what}, p{share * 100:g}', '2', f'{percentile(found, share) * 1000:.0f} ms', '']
    yield from cost.lines(hops, 'a task sent alone with its result')


def _parcels(one: RegionSite, two: RegionSite, parcels: int, regions: Regions) -> Iterator[list[str]]:
    """Yield the rate of tasks that do nothing and store no result, sent to a queue of the other region."""
    began = time.monotonic()
    with _Cost(regions) as cost:
        with ThreadPoolExecutor(2) as pool:
            for _ in pool.map(lambda start: _send(one, two, start), range(0, parcels, 500)):
                pass
        sent = time.monotonic() - began
        while one.parcels_left() or two.parcels_left():
            time.sleep(0.2)
    seconds = time.monotonic() - began
    yield [f'{parcels:,} parcels, sent', '2', f'{parcels / sent:,.0f}/s', '']
    yield [
        f'{parcels:,} parcels, until all are published and their deletions are home',
        '2',
        f'{parcels / seconds:,.0f}/s',
        '',
    ]
    yield from cost.lines(parcels, 'a parcel')


def _send(one: RegionSite, two: RegionSite, start: int) -> None:
    """Send 500 tasks as a group, to a queue without consumers."""
    signature = one.app.signature('late', (0.0,), immutable=True)
    group(signature.clone().set(region=two.name, queue='parcels', ignore_result=True) for _ in range(500)).apply_async()


def _idle(regions: Regions) -> Iterator[list[str]]:
    """Yield the cost of regions that have had nothing to do for a while."""
    time.sleep(_REST)
    with _Cost(regions) as cost:
        time.sleep(_IDLE_MINUTES * 60)
    yield from cost.lines(_IDLE_MINUTES, 'a minute of two idle regions')


class _Cost:
    """The work of the servers in a block: requests, documents written, and CPU time."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._servers = {region.server.url: region.server for region in regions.all}

    def __enter__(self) -> _Cost:
        self._spent = [Spent(server.host, server.port) for server in self._servers.values()]
        self._before = self._now()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._after = self._now()
        self._milliseconds = sum(spent.milliseconds() or 0.0 for spent in self._spent)

    def lines(self, count: int, what: str) -> Iterator[list[str]]:
        """Yield lines with the cost of each of `count`."""
        for name, before, after in zip(('requests', 'documents written'), self._before, self._after, strict=True):
            yield [f'{what}, {name}', str(len(self._regions.all)), f'{(after - before) / count:.2f}', '']
        yield [f'{what}, CPU of the servers', str(len(self._regions.all)), f'{self._milliseconds / count:.2f} ms', '']

    def _now(self) -> tuple[int, int]:
        found = [requests.get(f'{url}/_node/_local/_stats', timeout=60).json() for url in self._servers]
        return (
            sum(one['couchdb']['httpd']['requests']['value'] for one in found),
            sum(one['couchdb']['document_writes']['value'] for one in found),
        )


if __name__ == '__main__':
    main()
