"""Several beats of an app: each due date is sent once, whoever is killed or paused; another takes over; edits act."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import requests
from kombu import Connection
from pytest_celery import CeleryTestWorker

from celery_couchdb.beat import Schedules
from celery_couchdb.beat.entries import ScheduleState, task_id_of
from tests.conftest import PATIENCE, PATIENT_BROKER, wait_for
from tests.support import Inbox

from .conftest import Site

#: How many due dates a test of kills waits for, and how often the leader is killed before it can note what it has sent.
DUE_DATES, KILLS = int(os.environ.get('BEAT_DUE_DATES', '60')), int(os.environ.get('BEAT_KILLS', '3'))

#: For tests that promise nothing about the length of a lease: others take over sooner.
SHORT_LEASE = {'LEASE_SECONDS': '4'}

Start = Callable[..., CeleryTestWorker]


@pytest.fixture
def start(site: Site) -> Start:
    """A function that starts a beat, without waiting until it is ready; `entries` are those in its code."""
    site.client.create()

    def start(entries: dict[str, Any] | None = None, **environment: str) -> CeleryTestWorker:
        settings = {'broker_transport_options': PATIENT_BROKER, 'beat_schedule': entries or {}, 'result_expires': None}
        command = [sys.executable, '-m', 'celery', '-A', 'app', 'beat', '-S', 'couchdb', '--loglevel', 'INFO']
        environment = {**site.environment, 'SETTINGS': json.dumps(settings), **environment}
        return site.run(command, environment, {'app.py': b'from tests.acceptance.beat_app import app'})

    return start


@pytest.fixture
def inbox(site: Site) -> Iterator[Inbox]:
    """A consumer that acknowledges every task that was sent."""
    with Connection(site.environment['BROKER_URL'], transport_options=PATIENT_BROKER) as connection:
        yield Inbox(connection, 'celery')


@pytest.fixture
def schedules(site: Site) -> Iterator[Schedules]:
    schedules = Schedules(site.app)
    yield schedules
    schedules.client.close()


def entry(seconds: float, *args: Any, **options: Any) -> dict[str, Any]:
    return {'task': 'add', 'schedule': seconds, 'args': args, 'options': options}


def leader(site: Site) -> str:
    """Return the process id of the leader, or '' if there is none."""
    doc = site.client.get_or_none('broker:leader:beat') or {}
    return str(doc.get('holder') or '::').split(':')[1]


def leading(site: Site, *beats: CeleryTestWorker) -> CeleryTestWorker:
    """Wait until one of these beats leads, and return it."""
    by_pid = {str(beat.container.pid): beat for beat in beats}
    pid = wait_for(lambda: leader(site) if leader(site) in by_pid else '', 'one of the beats to lead')
    wait_for(lambda: 'leads from now on' in by_pid[pid].logs(), 'the log line of the leader')
    return by_pid[pid]


def state(site: Site, name: str) -> ScheduleState:
    return cast(ScheduleState, site.client.get(f'beat:state:{name}'))


def ids(inbox: Inbox) -> Counter[str]:
    return Counter(message.headers['id'] for message in inbox.messages)


def expected(state: ScheduleState, seconds: float) -> set[str]:
    """Return the ids of the tasks for all due dates until the last one that was sent."""
    assert state['last'] is not None
    count = round((state['last'] - state['anchor']) / seconds)
    return {task_id_of(state, round(state['anchor'] + seconds * n, 3)) for n in range(1, count + 1)}


def check_each_was_sent_once(names: list[str], seconds: float, schedules: Schedules, inbox: Inbox) -> int:
    """Disable the entries, receive what was sent, and return the number of due dates."""
    for name in names:
        schedules.disable(name)

    def states() -> list[ScheduleState]:
        return [state for name in names if (state := schedules.get(name).state)]

    wait_for(lambda: all(state['plan'] == 'disabled' for state in states()), 'the leader to notice')
    wanted = set().union(*(expected(state, seconds) for state in states()))
    assert sum(state['count'] for state in states()) == len(wanted)
    assert [state['skipped'] for state in states()] == [0] * len(names)
    inbox.drain_until(lambda: wanted <= set(ids(inbox)), 'the tasks of all due dates')
    assert ids(inbox) == Counter(wanted)
    return len(wanted)


@pytest.mark.slow
def test_beats_of_which_one_is_killed_again_and_again(
    site: Site, start: Start, inbox: Inbox, schedules: Schedules
) -> None:
    entries = {f'entry {n}': entry(0.25, n, 1, missed='all') for n in range(max(1, DUE_DATES // 50))}
    beats = [start(entries, **SHORT_LEASE) for _ in range(3)]
    leading(site, *beats)
    chosen, killed, due, received = random.Random(5), 0, time.monotonic() + 2, 0
    while len(ids(inbox)) < DUE_DATES or killed < 5:
        inbox.drain(0.1)
        # Only while one of them leads: to take over, another one must have lived for a lease.
        if time.monotonic() >= due and len(ids(inbox)) > received:
            received, victim = len(ids(inbox)), chosen.choice(beats)
            beats.remove(victim)
            victim.kill()
            beats.append(start(entries, **SHORT_LEASE))
            killed, due = killed + 1, time.monotonic() + 2
    leading(site, *beats)
    count = check_each_was_sent_once(list(entries), 0.25, schedules, inbox)
    print(f'{count} due dates were sent once; {killed} beats were killed')


def test_leader_is_killed_between_sending_and_noting(
    site: Site, start: Start, inbox: Inbox, schedules: Schedules
) -> None:
    entries = {name: entry(1, 1, 1, missed='all') for name in ('a', 'b')}
    for _ in range(KILLS):
        beat = start(entries, DIE_AFTER_SENDING='yes')
        assert beat.container.wait(PATIENCE) == -signal.SIGKILL
        assert state(site, 'a')['count'] == 0
        site.client.put({**site.client.get('broker:leader:beat'), 'holder': None})  # the next one need not wait
        inbox.drain(0.1)
    leading(site, start(entries))
    wait_for(lambda: state(site, 'a')['count'] > KILLS, 'the notes of a beat that lives')
    assert check_each_was_sent_once(list(entries), 1, schedules, inbox) > KILLS


def test_standby_takes_over(site: Site, start: Start, inbox: Inbox) -> None:
    """Within 20 seconds after a kill, and without waiting for the lease after a clean stop."""
    entries = {'a': entry(1, 1, 1, missed='all')}
    beats = [start(entries) for _ in range(3)]
    first = leading(site, *beats)
    first.kill()
    beats.remove(first)
    killed = time.monotonic()
    second = leading(site, *beats)
    print(f'the standby led {time.monotonic() - killed:.1f} s after the kill')
    assert second.container.terminate() == 0
    stopped = time.monotonic()
    assert leader(site) != str(second.container.pid)  # it has released the lead
    beats.remove(second)
    leading(site, *beats)
    print(f'the standby led {time.monotonic() - stopped:.1f} s after the clean stop')
    count = len(ids(inbox))
    inbox.drain_until(lambda: len(ids(inbox)) > count, 'a task of the third leader')


def test_edits_act_at_once(site: Site, start: Start, inbox: Inbox, schedules: Schedules) -> None:
    leading(site, start({'in code': entry(3600, 1, 1)}))

    def planned(name: str) -> float:
        """Wait until the leader has planned an entry anew, and return how long that took, in seconds."""
        began = time.monotonic()
        item = schedules.get(name)
        wait_for(lambda: (found := schedules.get(name)).state and found.state['plan'] == found.entry.plan, item.name)
        return time.monotonic() - began

    seconds = {}
    schedules.add('python', 'add', 0.2, args=(1, 2))
    seconds['add'] = planned('python')
    inbox.wait(2)
    schedules.disable('python')
    seconds['disable'] = planned('python')
    count = state(site, 'python')['count']
    inbox.wait(count)
    inbox.stays(count, 1.0)
    document = {'type': 'Schedule', 'task': 'add', 'args': [5, 6], 'schedule': {'every': 0.2}}
    address = site.client.address
    put = requests.put(
        f'{address.url}/beat:entry:curl',
        json=document,
        timeout=PATIENCE,
        auth=(str(address.user), str(address.password)),
    )
    assert put.status_code == 201
    seconds['PUT'] = planned('curl')
    inbox.wait(count + 2)
    assert inbox.bodies[-1][0] == [5, 6]
    deleted = requests.delete(
        f'{address.url}/beat:entry:curl',
        params={'rev': put.json()['rev']},
        timeout=PATIENCE,
        auth=(str(address.user), str(address.password)),
    )
    assert deleted.status_code == 200
    wait_for(lambda: site.client.get_or_none('beat:state:curl') is None, 'the deletion of the state')
    while (count := len(inbox.messages)) != len(inbox.drain(1.0).messages):
        pass  # what was sent before
    inbox.stays(count, 1.0)
    schedules.edit('in code', schedule=0.2, args=(7, 8))
    seconds['edit'] = planned('in code')
    inbox.drain_until(lambda: inbox.bodies[-1][0] == [7, 8], 'the edited entry')
    print(f'planned after {seconds}')


def test_beat_inside_of_workers(site: Site, schedules: Schedules) -> None:
    """Every worker has one, and the tasks run once; when a worker stops or is killed, another one takes over."""
    name = str(site.journal)
    entries = {'a': {'task': 'nap', 'schedule': 1, 'args': (name, 'x', 0.0), 'options': {'missed': 'all'}}}
    workers = [
        site.worker(
            '-B', '--scheduler', 'couchdb', '--loglevel', 'INFO', beat_schedule=entries, pool='prefork', **OPTIONS
        )
        for _ in range(2)
    ]
    wait_for(lambda: len(site.journalled()) >= 4, 'two tasks')
    holder = leader(site)
    [first] = [worker for worker in workers if worker.container.pid in ancestors(int(holder))]
    assert first.container.terminate() == 0
    wait_for(lambda: leader(site) not in ('', holder), 'the beat of the other worker to lead')
    count = len(site.journalled())
    wait_for(lambda: len(site.journalled()) >= count + 4, 'more tasks')
    schedules.disable('a')
    wait_for(lambda: (known := schedules.get('a').state) and known['plan'] == 'disabled', 'the end')
    total = state(site, 'a')['count']
    wait_for(lambda: len(site.journalled()) == 2 * total, 'each due date to run once')


#: The settings of workers with a beat.
OPTIONS: dict[str, Any] = {'broker_transport_options': PATIENT_BROKER, 'result_expires': None}


def ancestors(pid: int) -> list[int]:
    """Return the process ids of a process's parent, grandparent and so on."""
    found = []
    while pid > 1:
        pid = int(Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])
        found.append(pid)
    return found
