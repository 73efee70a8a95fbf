"""Several beats of an app: if one stops, another takes over (`tests/chaos` kills them); edits act at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import psutil
import pytest
import requests
from kombu import Connection
from pytest_celery import CeleryTestWorker

from celery_couchdb.contrib.beat import Schedules
from celery_couchdb.contrib.beat.entries import ScheduleState
from tests.acceptance.conftest import APP, Site
from tests.conftest import PATIENCE, PATIENT_BROKER, wait_for
from tests.support import Inbox

Start = Callable[..., CeleryTestWorker]


@pytest.fixture
def start(site: Site) -> Start:
    """A function that starts a beat, without waiting until it is ready; `entries` are those in its code."""
    site.client.create()

    def start(entries: dict[str, Any] | None = None) -> CeleryTestWorker:
        settings = {'broker_transport_options': PATIENT_BROKER, 'beat_schedule': entries or {}, 'result_expires': None}
        command = [sys.executable, '-m', 'celery', '-A', 'app', 'beat', '-S', 'couchdb', '--loglevel', 'INFO']
        environment = {**site.environment, 'SETTINGS': json.dumps(settings)}
        return site.run(command, environment, APP)

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


def leader(site: Site) -> str:
    """Return the process id of the leader, or '' if there is none."""
    doc = site.client.get_or_none('broker:leader:beat') or {}
    return str(doc.get('holder') or '::').split(':')[1]


def state(site: Site, name: str) -> ScheduleState:
    return cast(ScheduleState, site.client.get(f'beat:state:{name}'))


def test_edits_act_at_once(site: Site, start: Start, inbox: Inbox, schedules: Schedules) -> None:
    start({'in code': {'task': 'add', 'schedule': 3600, 'args': (1, 1)}})

    def wait_until_planned(name: str) -> None:
        wait_for(lambda: (found := schedules.get(name)).state and found.state['plan'] == found.entry.plan, name)

    wait_for(lambda: site.client.get_or_none('beat:state:in code'), 'the beat to lead')
    schedules.add('python', 'add', 0.2, args=(1, 2))
    wait_until_planned('python')
    inbox.wait(2)
    schedules.disable('python')
    wait_until_planned('python')
    count = state(site, 'python')['count']
    inbox.wait(count)
    address = site.client.address
    curl: dict[str, Any] = {
        'url': f'{address.url}/beat:entry:curl',
        'timeout': PATIENCE,
        'auth': (address.user, address.password),
    }
    put = requests.put(**curl, json={'type': 'Schedule', 'task': 'add', 'args': [5, 6], 'schedule': {'every': 0.2}})
    assert put.status_code == 201
    wait_until_planned('curl')
    inbox.wait(count + 2)
    assert {tuple(body[0]) for body in inbox.bodies[count:]} == {(5, 6)}
    assert requests.delete(**curl, params={'rev': put.json()['rev']}).status_code == 200
    wait_for(lambda: site.client.get_or_none('beat:state:curl') is None, 'the deletion of the state')
    while (count := len(inbox.messages)) != len(inbox.drain(1.0).messages):
        pass  # what was sent before
    inbox.stays(count, 1.0)
    schedules.edit('in code', schedule=0.2, args=(7, 8))
    wait_until_planned('in code')
    inbox.drain_until(lambda: inbox.bodies[-1][0] == [7, 8], 'the edited entry')


def test_beat_inside_of_workers(site: Site, schedules: Schedules) -> None:
    """Every worker has one, and the tasks run once; when a worker stops, another one takes over at once."""
    name = str(site.journal)
    entries = {'a': {'task': 'nap', 'schedule': 1, 'args': (name, 'x', 0.0), 'options': {'grace': 1e9}}}
    workers = [
        site.worker(
            '-B',
            '--scheduler',
            'couchdb',
            pool='prefork',
            concurrency=1,
            beat_schedule=entries,
            broker_transport_options=PATIENT_BROKER,
            result_expires=None,
        )
        for _ in range(2)
    ]
    wait_for(lambda: len(site.journalled()) >= 4, 'two tasks')
    holder = leader(site)
    parents = [process.pid for process in psutil.Process(int(holder)).parents()]
    [first, second] = sorted(workers, key=lambda worker: worker.container.pid not in parents)
    assert first.container.terminate() == 0
    assert leader(site) != holder  # it has released the lead
    wait_for(lambda: leader(site) not in ('', holder), 'the beat of the other worker to lead')
    count = len(site.journalled())
    wait_for(lambda: len(site.journalled()) >= count + 4, 'more tasks')
    schedules.disable('a')
    wait_for(lambda: (known := schedules.get('a').state) and known['plan'] == 'disabled', 'the end')
    total = state(site, 'a')['count']
    wait_for(lambda: len(site.journalled()) == 2 * total, 'each due date to run once')
    left = psutil.Process(int(leader(site)))
    psutil.Process(second.container.pid).kill()
    wait_for(lambda: not left.is_running() or left.status() == psutil.STATUS_ZOMBIE, 'the end of beat with its worker')
