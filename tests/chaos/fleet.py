"""A fleet while things fail, `python -m tests.chaos.fleet`: is each message worked on, and once if nobody is killed?

Many consumers of one queue run, a few in each process. Mostly those are killed that listen for all others, and all of
these at once. The database of broadcasts is deleted, and the server is killed if the options give commands for that.
Meanwhile messages come one by one, in bursts, and so that all consumers but a few are busy.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import click
from kombu import Connection, Queue

from kombu_couchdb.documents.ids import CONSUMER
from kombu_couchdb.errors import DatabaseMissing, NotFound
from kombu_couchdb.fleet.attention import Peers
from kombu_couchdb.queues.databases import broadcasts_of

from .fleet_consumer import OPTIONS, QUEUE
from .ledger import Ledger
from .server import Server

__all__ = ['FAULTS', 'Site', 'Verdict', 'run']

#: The faults that need no commands for the server. Listeners are killed more often than others.
FAULTS = ('listeners killed', 'listeners paused', 'consumer killed', 'broadcasts deleted')

#: How long listeners are paused, at least and at most, in seconds: less than a lease, which is not the question here.
_PAUSED = (2.0, 5.0)

#: The ids of messages begin so: they begin with the time.
_MESSAGES = '0'

#: How many consumers a process has.
_EACH = 5


class Verdict(NamedTuple):
    """What became of the messages."""

    published: int
    #: The keys of messages that no consumer has ended, and of those that were started twice although nobody that had
    #: started them was killed.
    lost: list[str]
    twice: list[str]
    #: How many messages are still in the queue, and how many were started twice because of a kill.
    stuck: int
    repeated: int
    #: The longest time that a message waited while no fault happened, in seconds.
    slowest: float

    @property
    def holds(self) -> bool:
        """Whether all promises were kept."""
        return not (self.lost or self.twice or self.stuck)

    def __str__(self) -> str:
        return (
            f'{self.published} messages: {len(self.lost)} lost, {self.stuck} stuck, {len(self.twice)} twice without a '
            f'kill, {self.repeated} twice after a kill; the longest wait without a fault was {self.slowest:.1f} s'
        )


class Site:
    """A context manager: a database, and `consumers` consumers. On exit they end, and the databases are deleted."""

    def __init__(self, server: Server, folder: Path, consumers: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.server, self._folder, self._consumers = server, folder, consumers
        database = f'chaos-{uuid.uuid4().hex[:12]}'
        self.client, self.ledger = server.client(database), Ledger(folder / 'ledger.jsonl')
        self._url = server.url_through(server.port, database)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        #: The monotonic times at which processes were killed, by process id.
        self.killed: dict[int, float] = {}
        #: The messages that were published: when, by key.
        self.published: dict[str, float] = {}
        #: The monotonic times of faults: from, to.
        self.faults: list[tuple[float, float]] = []
        self._producer = Connection(self._url, transport_options=OPTIONS)

    def start(self, consumers: int) -> None:
        """Start a process with so many consumers."""
        with (self._folder / 'consumers.log').open('ab') as log:
            process = subprocess.Popen(
                [sys.executable, '-m', 'tests.chaos.fleet_consumer', str(consumers)],
                cwd=Path(__file__).parents[2],
                env={**os.environ, 'CHAOS_BROKER': self._url, 'CHAOS_LEDGER': str(self.ledger.path)},
                stdout=log,
                stderr=log,
            )
        self.processes[process.pid] = process

    def kill(self, pids: Sequence[int]) -> None:
        """Kill processes, all at once, and start others in their place."""
        for pid in pids:
            self.processes[pid].kill()
        for pid in pids:
            self.processes.pop(pid).wait()
            self.killed[pid] = time.monotonic()
        for _ in pids:
            self.start(_EACH)

    def publish(self, count: int, seconds: float) -> None:
        """Publish messages that take so many seconds each; try until the server responds."""
        producer = self._producer.Producer(serializer='json')
        for _ in range(count):
            key = uuid.uuid4().hex
            producer.publish(
                {'key': key, 'seconds': seconds},
                routing_key=QUEUE,
                declare=[Queue(QUEUE)],
                retry=True,
                retry_policy={'max_retries': None, 'interval_start': 0.1, 'interval_max': 1.0},
            )
            self.published[key] = time.monotonic()

    @property
    def registered(self) -> int:
        """The number of consumers with a heartbeat."""
        return len(self.client.id_range(CONSUMER))

    @property
    def listeners(self) -> list[int]:
        """The ids of the processes whose consumers have the first ranks."""
        peers, pids = Peers(), dict[str, int]()
        for row in self.client.id_range(CONSUMER, docs=True):
            peers.seen(row['doc'])
            pids[row['id']] = row['doc']['pid']
        return sorted({pids[name] for name in peers.listeners} & self.processes.keys())

    def __enter__(self) -> Site:
        self.client.create()
        for begin in range(0, self._consumers, _EACH):
            self.start(min(_EACH, self._consumers - begin))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
        self._producer.release()
        for client in (broadcasts_of(self.client), self.client):
            with suppress(NotFound, DatabaseMissing):
                client.delete()
            client.close()


def run(site: Site, faults: Sequence[str], seed: int, patience: float, tell: Callable[[str], None]) -> Verdict:
    """Let the faults happen one after the other while messages come; return what became of them."""
    dice = random.Random(seed)
    _wait_until(lambda: site.registered >= len(site.processes), patience)  # each process has begun
    for fault in faults:
        tell(f'{len(site.published)} messages were published; now: {fault}')
        _load(site, dice)
        began = time.monotonic()
        _happen(site, fault, dice)
        _load(site, dice)
        site.faults.append((began, time.monotonic()))
    events = list(site.ledger.new_events())

    def is_done() -> bool:
        events.extend(site.ledger.new_events())
        return not (site.published.keys() - {event['key'] for event in events if event['event'] == 'end'}) and not len(
            site.client.id_range(_MESSAGES, limit=1)
        )

    _wait_until(is_done, patience)
    return _verdict(site, events)


def _load(site: Site, dice: random.Random) -> None:
    """Publish messages: a burst of short ones, long ones that keep most consumers busy, or one after the other."""
    kind = dice.choice(['burst', 'long', 'single'])
    if kind == 'burst':
        site.publish(2 * len(site.processes) * _EACH, 0.05)
    elif kind == 'long':
        site.publish(len(site.processes) * _EACH - 2, 3.0)
    for _ in range(10):
        site.publish(1, 0.02)
        time.sleep(dice.uniform(0.02, 0.3))


def _happen(site: Site, fault: str, dice: random.Random) -> None:
    if fault == 'listeners killed':
        site.kill(site.listeners)
    elif fault == 'consumer killed':
        site.kill([dice.choice(sorted(site.processes))])
    elif fault == 'listeners paused':
        pids = site.listeners
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        _load(site, dice)
        time.sleep(dice.uniform(*_PAUSED))
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    elif fault == 'broadcasts deleted':
        with suppress(NotFound, DatabaseMissing):
            broadcasts_of(site.client).delete()
    else:
        site.server.kill()
        time.sleep(dice.uniform(1.0, 5.0))
        site.server.start()


def _verdict(site: Site, events: Sequence[dict[str, object]]) -> Verdict:
    starts, ended = Counter[str](), set[str]()
    excused, first = set[str](), dict[str, float]()
    for event in events:
        key, at = str(event['key']), float(str(event['at']))
        if event['event'] == 'end':
            ended.add(key)
            continue
        starts[key] += 1
        first.setdefault(key, at)
        if site.killed.get(int(str(event['pid'])), -1.0) >= at:
            excused.add(key)  # the process was killed after it had received the message
    repeated = {key for key, count in starts.items() if count > 1}
    calm = {
        key: at
        for key, at in site.published.items()
        if not any(began - 1.0 <= first.get(key, at) and at <= end for began, end in site.faults)
    }
    return Verdict(
        len(site.published),
        sorted(site.published.keys() - ended),
        sorted(repeated - excused),
        len(site.client.id_range(_MESSAGES)),
        len(repeated & excused),
        max((first[key] - at for key, at in calm.items() if key in first), default=0.0),
    )


def _wait_until(is_true: Callable[[], bool], patience: float) -> None:
    deadline = time.monotonic() + patience
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.2)


@click.command()
@click.option('--seed', type=int, default=None, help='The seed of the faults.  [default: random]')
@click.option('--consumers', default=30, show_default=True, help='The number of consumers, five in each process.')
@click.option('--faults', default=20, show_default=True, help='The number of faults.')
@click.option('--start-server', help='The command that starts the server and returns when it responds.')
@click.option('--kill-server', help='The command that kills the server.')
@click.option('--patience', default=120.0, show_default=True, help='How long to wait for the end, in seconds.')
@click.option(
    '--output', default='build/chaos', type=click.Path(file_okay=False, path_type=Path), help='The folder of the logs.'
)
def main(
    seed: int | None,
    consumers: int,
    faults: int,
    start_server: str | None,
    kill_server: str | None,
    patience: float,
    output: Path,
) -> None:
    """Run many consumers while those that listen for all others are killed, and check that no message is lost."""
    if bool(start_server) != bool(kill_server):
        raise click.UsageError('--start-server and --kill-server need each other')
    seed = random.randrange(1_000_000) if seed is None else seed
    dice, folder = random.Random(seed), output / f'fleet-{seed}-{time.strftime("%H%M%S")}'
    kinds = [FAULTS[0], *FAULTS, *(['server killed'] if kill_server else [])]
    planned = (kinds * faults)[:faults]
    dice.shuffle(planned)
    click.echo(f'seed {seed}; logs are in {folder}', err=True)
    with Site(Server(os.environ['COUCHDB_URL'], start_server, killing=kill_server), folder, consumers) as site:
        verdict = run(site, planned, seed, patience, lambda text: click.echo(text, err=True))
    click.echo(verdict)
    sys.exit(not verdict.holds)


if __name__ == '__main__':
    main()
