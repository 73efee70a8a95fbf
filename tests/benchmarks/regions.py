"""Regions: the tables of the thesis, delays, the cost of a task, and outages, `python -m tests.benchmarks.regions`.

It needs a server for each region, REGION_URLS, and prints tables. The steps are `sleep 5`, so the load of the machine
matters little there; it matters for delays and rates.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import requests
from celery import chain
from celery.result import AsyncResult

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import DatabaseMissing
from kombu_couchdb.queues.databases import broadcasts_of
from tests.chaos.faults.regions import LinkCut, LinkFault, LinkSilent
from tests.chaos.ledger import Ledger
from tests.chaos.region_site import Regions, RegionSite
from tests.chaos.server import Server

from .figures import percentile
from .processes import Spent
from .table import simple_table

#: The duration of a step, and the longest wait for a result, in seconds.
_STEP, _PATIENCE = 5.0, 600.0

#: The seconds of rest before idle regions are measured, and the minutes of the measurement.
_REST, _IDLE_MINUTES = 100.0, 2

#: The least time for 6 jobs of 3 steps with two processes a region. 18 steps on four processes need five rounds.
_IDEAL = {1: '45 s', 2: '25 s', 3: '15 s'}


#: What is measured between two regions, and whether that is done by default.
_BETWEEN_TWO = {'aba': True, 'hop': True, 'tasks': True, 'cut': False, 'idle': True}


@click.command()
@click.option('-m', '--measure', 'chosen', multiple=True, type=click.Choice(['jobs', 'many', *_BETWEEN_TWO]))
@click.option('--tasks', default=2000, show_default=True, help='The number of empty tasks for the rate.')
@click.option('--hops', default=200, show_default=True, help='The number of tasks for the delay of a hop.')
@click.option('--cut', default=600.0, show_default=True, help='The length of an outage, in seconds.')
def main(chosen: tuple[str, ...], tasks: int, hops: int, cut: float) -> None:
    """Measure regions."""
    servers = [Server(url) for url in os.environ['REGION_URLS'].split(',')]
    wanted = set(chosen or ('jobs', *(name for name, is_default in _BETWEEN_TWO.items() if is_default)))
    lines = [['', 'Regions', 'Measured', 'Ideal']]
    for count in (1, 2, 3) if wanted & {'jobs', 'many'} else ():
        with TemporaryDirectory() as folder, _started(servers[:count], Path(folder)) as regions:
            if 'jobs' in wanted:
                lines.append(['6 jobs of 3 steps', str(count), _seconds(_jobs(regions, 6)), _IDEAL[count]])
                click.echo(lines[-1])
            if 'many' in wanted and count == 3:
                lines.append(['90 jobs of 3 steps', str(count), _seconds(_jobs(regions, 90)), '225 s'])
                click.echo(lines[-1])
    if wanted & {*_BETWEEN_TWO}:
        with TemporaryDirectory() as folder, _started(servers[:2], Path(folder)) as regions:
            for line in _between_two(regions, wanted, hops, tasks, cut):
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
    return Regions([[server] for server in servers], folder, changes, ('prefork', 2))


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


def _between_two(regions: Regions, wanted: set[str], hops: int, tasks: int, cut: float) -> Iterator[list[str]]:
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
        yield from _batch(one, two, hops, regions)
    if 'tasks' in wanted:
        yield from _batch(one, two, tasks, regions)
    for kind in (LinkCut, LinkSilent) if 'cut' in wanted else ():
        yield from _cut(one, two, kind, cut, regions)
    if 'idle' in wanted:
        yield from _idle(regions)


def _send(one: RegionSite, two: RegionSite) -> AsyncResult:
    return one.app.send_task('late', (0.0,), region=two.name)


def _times(regions: Regions, event: str) -> dict[str, float]:
    """Return when each task began (`start`), or ended (`end`), by its id."""
    events = Ledger(regions.ledger.path).new_events()
    return {found['key']: found['at'] for found in events if found['event'] == event}


def _hops(one: RegionSite, two: RegionSite, hops: int, regions: Regions) -> Iterator[list[str]]:
    """Yield the delays of tasks of the other region, each sent alone, and their cost."""
    sent, back = dict[str, float](), dict[str, float]()
    with _Cost(regions) as cost:
        for _ in range(hops):
            before = time.monotonic()
            result = _send(one, two)
            result.get(timeout=_PATIENCE)
            sent[str(result.id)] = before
            back[str(result.id)] = time.monotonic()
    starts, ends = _times(regions, 'start'), _times(regions, 'end')
    for what, delays in (
        ('until it begins', [starts[key] - sent[key] for key in sent]),
        ('from its end until its result is back', [back[key] - ends[key] for key in sent]),
        ('there and back', [back[key] - sent[key] for key in sent]),
    ):
        for share in (0.5, 0.99):
            yield [f'a task, {what}, p{share * 100:g}', '2', f'{percentile(delays, share) * 1000:.0f} ms', '']
    yield from cost.lines(hops, 'a task sent alone')


def _batch(one: RegionSite, two: RegionSite, tasks: int, regions: Regions) -> Iterator[list[str]]:
    """Yield the rate of tasks of the other region that are sent together, until their results are back."""
    began = time.monotonic()
    with _Cost(regions) as cost:
        results = [_send(one, two) for _ in range(tasks)]
        sent = time.monotonic() - began
        for result in results:
            result.get(timeout=_PATIENCE)
        seconds = time.monotonic() - began
        while one.given() or two.given():
            time.sleep(0.1)
    yield [f'{tasks:,} tasks together, sent', '2', f'{tasks / sent:,.0f}/s', '']
    yield [f'{tasks:,} tasks together, there and back', '2', f'{tasks / seconds:,.0f}/s', '']
    yield from cost.lines(tasks, f'a task of {tasks:,}')


def _cut(
    one: RegionSite, two: RegionSite, kind: type[LinkFault], seconds: float, regions: Regions
) -> Iterator[list[str]]:
    """Yield how long a task waits for its begin, and for its result at home, after an outage in which it was sent."""
    proxies = [proxy for link in regions.links for proxy in link.proxies]
    for proxy in proxies:
        kind.turn[0](proxy)
    time.sleep(seconds / 2)
    result = _send(one, two)
    time.sleep(seconds / 2)
    for proxy in proxies:
        kind.turn[1](proxy)
    restored = time.monotonic()
    result.get(timeout=_PATIENCE)
    back, start = time.monotonic(), _times(regions, 'start')[str(result.id)]
    what = f'after {seconds:g} s, {kind.name}, until a task'
    yield [f'{what} begins', '2', f'{start - restored:.1f} s', '']
    yield [f'{what} has its result at home', '2', f'{back - restored:.1f} s', '']


def _idle(regions: Regions) -> Iterator[list[str]]:
    """Yield the cost of regions that have had nothing to do for a while."""
    time.sleep(_REST)
    with _Cost(regions) as cost:
        time.sleep(_IDLE_MINUTES * 60)
    yield from cost.lines(_IDLE_MINUTES, 'a minute of two idle regions')


class _Cost:
    """The work of the servers in a block: requests, documents written, and CPU time."""

    def __init__(self, regions: Regions) -> None:
        self._servers = {server.url: server for region in regions.all for server in region.servers}
        self._databases: dict[str, Client] = {}
        for region in regions.all:
            clients = {**region.client, 'broadcasts': broadcasts_of(region.client['broker'])}
            self._databases |= {f'{kind} of {region.name}': client for kind, client in clients.items()}

    def __enter__(self) -> _Cost:
        self._spent = [Spent(server.host, server.port) for server in self._servers.values()]
        self._writes = self._sequences()
        self._requests = self._count_requests()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._requests = self._count_requests() - self._requests
        self._writes = {name: at - self._writes[name] for name, at in self._sequences().items()}
        self._milliseconds = sum(spent.milliseconds() or 0.0 for spent in self._spent)

    def lines(self, count: int, what: str) -> Iterator[list[str]]:
        """Yield lines with the cost of each of `count`."""
        yield [f'{what}, requests', '2', f'{self._requests / count:.2f}', '']
        yield [f'{what}, documents written', '2', f'{sum(self._writes.values()) / count:.2f}', '']
        for name, written in self._writes.items():
            if written:
                yield [f'{what}, documents written, {name}', '2', f'{written / count:.2f}', '']
        yield [f'{what}, CPU of the servers', '2', f'{self._milliseconds / count:.2f} ms', '']

    def _count_requests(self) -> int:
        found = [requests.get(f'{url}/_node/_local/_stats', timeout=60).json() for url in self._servers]
        return sum(stats['couchdb']['httpd']['requests']['value'] for stats in found)

    def _sequences(self) -> dict[str, int]:
        """Return the number of writes so far, by database."""
        found = dict.fromkeys(self._databases, 0)
        for name, client in self._databases.items():
            with suppress(DatabaseMissing):
                found[name] = int(str(client.info()['update_seq']).partition('-')[0])
        return found


if __name__ == '__main__':
    main()
