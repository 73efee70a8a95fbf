"""Beats while things fail, `python -m tests.chaos.beat`: is each due date sent once, and none left out?

Three beats run, each behind a proxy. They are killed, paused for longer than their lease, and cut off; the clocks of
their machines are set; somebody edits an entry every second. No worker runs: what was sent is counted at the end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import click
from celery import Celery

from celery_couchdb.contrib.beat import Schedules
from celery_couchdb.contrib.beat.entries import task_id_of
from kombu_couchdb.documents.ids import LEADER
from kombu_couchdb.leases.leader import LEASE_SECONDS

from .proxy import Proxy
from .server import Server

__all__ = ['FAULTS', 'Site', 'run']

#: How long each kind of fault lasts, in seconds, at least and at most, if leases last for `LEASE_SECONDS`.
FAULTS = {'killed': (0.0, 2.0), 'paused': (16.0, 25.0), 'clock set': (1.0, 10.0), 'outage': (2.0, 20.0)}

#: The entries that nobody edits, each with its interval in seconds.
_KEPT = {f'kept {number}': seconds for number, seconds in enumerate((1.0, 1.7, 3.0, 0.5))}


class Beat:
    """One beat at a time, behind its own proxy, on a machine whose clock can be set."""

    def __init__(self, name: str, server: Server, database: str, folder: Path, lease: float) -> None:
        self.name, self.proxy, self._folder = name, Proxy(server.host, server.port), folder
        self.lock, self._clock, self._number = threading.Lock(), folder / f'{name}.clock', 0
        settings = {'broker_url': server.url_through(self.proxy.port, database), 'result_expires': None}
        self._environment = {
            'CHAOS_SETTINGS': json.dumps(settings),
            'CHAOS_CLOCK': str(self._clock),
            'CHAOS_LEASE': str(lease),
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start a beat."""
        self._number += 1
        with (self._folder / f'{self.name}.{self._number}.log').open('wb') as log:
            self.process = subprocess.Popen(
                [sys.executable, '-m', 'celery', '-A', 'tests.chaos.beat_app', 'beat', '-S', 'couchdb', '-l', 'INFO'],
                cwd=Path(__file__).parents[2],
                env={**os.environ, **self._environment},
                stdout=log,
                stderr=log,
            )

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        if self.process is not None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def happen(self, fault: str, seconds: float, step: float) -> None:
        """Let a fault happen, and heal it; `step` is how far the clock is set."""
        with self.lock:
            if fault == 'killed':
                self.kill()
                time.sleep(seconds)
                self.start()
            elif fault == 'paused':
                self.signal(signal.SIGSTOP)
                time.sleep(seconds)
                self.signal(signal.SIGCONT)
            elif fault == 'clock set':
                self._clock.write_text(str(step))
                time.sleep(seconds)
            else:
                self.proxy.refuse()
                time.sleep(seconds)
                self.proxy.restore()


class Site:
    """A context manager: a database, and three beats. On exit they end, and the database is deleted."""

    def __init__(self, server: Server, folder: Path, lease: float = LEASE_SECONDS) -> None:
        """Let leases last for `lease` seconds, and faults in proportion."""
        folder.mkdir(parents=True, exist_ok=True)
        database = f'chaos-{uuid.uuid4().hex[:12]}'
        self.client = server.client(database)
        self.beats = [Beat(f'beat{number}', server, database, folder, lease) for number in range(3)]
        self.scale = lease / LEASE_SECONDS
        app = Celery('chaos', broker=server.url_through(server.port, database), set_as_current=False)
        self.client.create()
        self.schedules = Schedules(app)

    @property
    def leader(self) -> Beat:
        """The beat that leads, or any other."""
        holder = str((self.client.get_or_none(f'{LEADER}beat') or {}).get('holder')).split(':')
        return next((beat for beat in self.beats if beat.process and str(beat.process.pid) in holder), self.beats[0])

    def __enter__(self) -> Site:
        for name, seconds in _KEPT.items():
            self.schedules.add(name, 'task', seconds, args=[name], grace=1e9)
        self.schedules.add('edited', 'task', 1.0, args=['edited'], grace=1e9)
        for beat in self.beats:
            beat.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for beat in self.beats:
            beat.kill()
            with beat.proxy:
                pass
        self.schedules.client.close()
        self.client.delete()


def run(site: Site, faults: Sequence[str], seed: int, patience: float, tell: Callable[[str], None]) -> list[str]:
    """Let the faults happen one after the other, mostly to the leader, and return the promises that were broken."""
    dice, done = random.Random(seed), threading.Event()
    editor = threading.Thread(target=_edit, args=(site, random.Random(seed), done), daemon=True)
    editor.start()
    for fault in faults:
        seconds = round(site.scale * dice.uniform(*FAULTS[fault]), 1)
        beat = site.leader if dice.random() < 0.7 else dice.choice(site.beats)
        step = dice.choice([-1, 1]) * dice.choice([1.0, 60.0, 3600.0, 86400.0])
        tell(f'{beat.name}: {fault}, {seconds:g} s' + (f', by {step:g} s' if fault == 'clock set' else ''))
        beat.happen(fault, seconds, step)
        time.sleep(dice.uniform(0.5, 4.0))
    done.set()
    editor.join()
    return _verdict(site, patience, tell)


def _edit(site: Site, dice: random.Random, done: threading.Event) -> None:
    while not done.wait(1.0):
        what = dice.choice(['schedule', 'args', 'disable', 'raw'])
        if what == 'schedule':
            site.schedules.edit('edited', schedule=dice.choice([0.5, 1.0, 2.0]), enabled=True)
        elif what == 'args':
            site.schedules.edit('edited', args=['edited', dice.random()])
        elif what == 'disable':
            site.schedules.disable('edited')
        else:  # as with curl: the start stays as it is
            doc = site.client.get('beat:entry:edited')
            site.client.try_put({**doc, 'schedule': {'every': dice.choice([0.5, 1.0, 2.0])}, 'enabled': True})


def _verdict(site: Site, patience: float, tell: Callable[[str], None]) -> list[str]:
    """Wait until everything that is due was sent, and compare it with the due dates."""
    for name in (*_KEPT, 'edited'):
        site.schedules.disable(name)
    deadline = time.monotonic() + patience
    while not all(
        (state := site.schedules.get(name).state) and state['plan'] == 'disabled' for name in (*_KEPT, 'edited')
    ):
        if time.monotonic() > deadline:
            return ['no beat has noticed that the entries were disabled']
        time.sleep(0.2)
    sent = Counter[str]()
    ids = Counter[str]()
    for row in site.client.id_range('once:', docs=True):
        ids[row['doc']['message']['headers']['id']] += 1
        sent[json.loads(row['doc']['message']['body'])[0][0]] += 1
    broken = [f'task {task_id} was sent {count} times' for task_id, count in ids.items() if count > 1]
    for name in (*_KEPT, 'edited'):
        state = site.schedules.get(name).state
        assert state is not None
        # A beat that was killed after it had sent a date of the edited entry may not have noted it before the edit.
        if state['count'] > sent[name] or (state['count'] < sent[name] and name != 'edited'):
            broken.append(f'{name}: {state["count"]} due dates are noted, and {sent[name]} were sent')
        if name == 'edited':
            continue
        seconds, anchor = _KEPT[name], state['anchor']
        dates = range(1, round(((state['last'] or anchor) - anchor) / seconds) + 1)
        wanted = {task_id_of(state, round(anchor + seconds * number, 3)) for number in dates}
        broken += [f'{name}: {len(missing)} due dates are missing' for missing in [wanted - ids.keys()] if missing]
        if state['skipped']:
            broken.append(f'{name}: {state["skipped"]} due dates were left out')
    tell(f'{sum(sent.values())} due dates were sent')
    return broken


@click.command()
@click.option('--seed', type=int, default=None, help='The seed of the faults.  [default: random]')
@click.option('--faults', default=40, show_default=True, help='The number of faults.')
@click.option('--patience', default=120.0, show_default=True, help='How long to wait for the end, in seconds.')
@click.option(
    '--output', default='build/chaos', type=click.Path(file_okay=False, path_type=Path), help='The folder of the logs.'
)
def main(seed: int | None, faults: int, patience: float, output: Path) -> None:
    """Run three beats while things fail, and check that each due date is sent once, and none is left out."""
    seed = random.randrange(1_000_000) if seed is None else seed
    dice, folder = random.Random(seed), output / f'beat-{seed}-{time.strftime("%H%M%S")}'
    click.echo(f'seed {seed}; logs are in {folder}', err=True)
    with Site(Server(os.environ['COUCHDB_URL']), folder) as site:
        broken = run(site, dice.choices([*FAULTS], k=faults), seed, patience, lambda text: click.echo(text, err=True))
    click.echo('\n'.join(broken) or 'all promises were kept')
    sys.exit(bool(broken))


if __name__ == '__main__':
    main()
