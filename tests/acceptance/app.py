"""The Celery app that the workers under test run."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.exceptions import Reject

from celery_couchdb.jobs import Jobs
from celery_couchdb.limits import LimitedTask
from celery_couchdb.unique import UniqueTask

app = Celery('acceptance', broker=os.environ['BROKER_URL'], backend=os.environ['RESULT_URL'])
app.conf.update(json.loads(os.environ['SETTINGS']))

if app.conf.security_key:
    app.setup_security()


@app.task(name='add')
def add(x: int, y: int) -> int:
    """Return the sum."""
    return x + y


@app.task(name='total')
def total(numbers: list[int]) -> int:
    """Return the sum of a list."""
    return sum(numbers)


@app.task(name='fail')
def fail(text: str) -> None:
    """Fail."""
    raise ValueError(text)


@app.task(name='length')
def length(data: Any) -> int:
    """Return the length."""
    return len(data)


@app.task(name='text')
def text(size: int) -> str:
    """Return a text."""
    return 'x' * size


@app.task(name='refuse')
def refuse(data: str) -> None:
    """Fail with a short text, whatever the argument is."""
    raise ValueError('no')


@app.task(name='refuse_twice', bind=True, max_retries=1)
def refuse_twice(self: Any, data: str) -> None:
    """Fail, and retry once."""
    raise self.retry(countdown=0.0, exc=ValueError('no'))


@app.task(name='endless', time_limit=1)
def endless(data: str) -> None:
    """Run until the time limit ends the process."""
    time.sleep(3600)


@app.task(name='lost')
def lost(data: str) -> None:
    """Kill the current process."""
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(name='noted')
def noted(task_id: str, journal: str) -> None:
    """Write the id of a failed task to the journal."""
    note(journal, task_id)


@app.task(name='now')
def now() -> float:
    """Return the current time."""
    return time.time()


@app.task(name='flaky', bind=True, max_retries=5)
def flaky(self: Any, failures: int, countdown: float) -> list[Any]:
    """Fail `failures` times; then return the number of retries and the current time."""
    if self.request.retries < failures:
        raise self.retry(countdown=countdown)
    return [self.request.retries, time.time()]


@app.task(name='nap')
def nap(journal: str, name: str, seconds: float | None) -> str:
    """Write the start and the end to the journal, `seconds` apart; with None, wait for the file `go on` in between."""
    note(journal, f'start {name}')
    pause(journal, seconds)
    note(journal, f'end {name}')
    return name


@app.task(name='late_nap', acks_late=True)
def late_nap(journal: str, name: str, seconds: float | None) -> str:
    """Do the same as `nap`, acknowledged late."""
    return str(nap(journal, name, seconds))


@app.task(name='kept', acks_late=True, keep_done=3600)
def kept(number: int) -> int:
    """Return the number; the completed message is kept."""
    return number


@app.task(name='retried', acks_late=True, autoretry_for=(ValueError,), retry_kwargs={'countdown': 3600})
def retried(text: str) -> None:
    """Fail, and try again in an hour."""
    raise ValueError(text)


@app.task(name='holder', bind=True, acks_late=True)
def holder(self: Any, journal: str) -> None:
    """Write to the journal whether the worker holds the message: before and after the file `go on` exists."""
    note(journal, f'held {Jobs(app).held(self)}')
    pause(journal, None)
    note(journal, f'held {Jobs(app).held(self)}')


def process(self: Any, journal: str) -> str:
    """Write the task's name and its process id to the journal, wait for the file `go on`, and write the end."""
    note(journal, f'{self.name} {os.getpid()}')
    pause(journal, None)
    note(journal, 'end')
    return 'done'


app.task(name='process', bind=True)(process)
app.task(name='late_process', bind=True, acks_late=True)(process)
app.task(name='safe_process', bind=True, acks_late=True, reject_on_worker_lost=True)(process)


@app.task(name='deadly', acks_late=True, reject_on_worker_lost=True)
def deadly(journal: str) -> None:
    """Write to the journal, and kill the current process."""
    note(journal, 'deadly')
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(name='refused', bind=True, acks_late=True)
def refused(self: Any, journal: str, name: str) -> str:
    """Reject the message, unless the file `may pass` exists."""
    if not Path(journal).with_name('may pass').exists():
        raise Reject('not now', requeue=False)
    note(journal, name)
    return name


@app.task(name='fragile')
def fragile(journal: str, name: str, *, prefix: str = '') -> str:
    """Fail, unless the file `may pass` exists."""
    if not Path(journal).with_name('may pass').exists():
        raise ValueError(f'{name} may not pass')
    note(journal, prefix + name)
    return name


@app.task(name='report', base=UniqueTask, bind=True, max_retries=3)
def report(self: Any, journal: str, name: str, seconds: float | None = 0.0, failures: int = 0) -> str:
    """Do the same as `nap`, after failing `failures` times."""
    note(journal, f'start {name}')
    pause(journal, seconds)
    if self.request.retries < failures:
        raise self.retry(countdown=0.2)
    note(journal, f'end {name}')
    return name


@app.task(name='again', base=LimitedTask, bind=True)
def again(self: Any, journal: str, name: str, seconds: float | None, countdown: float | None) -> str:
    """Retry once after `countdown` seconds, if it is not None."""
    note(journal, f'start {name}')
    if countdown is not None and self.request.retries == 0:
        raise self.retry(countdown=countdown)
    pause(journal, seconds)
    note(journal, f'end {name}')
    return name


@app.task(name='ask')
def ask(x: int, y: int) -> int:
    """Run the task `add` and wait for its result."""
    # Not allow_join_result(): it applies to the whole process, and so to the tasks in other threads.
    return int(add.delay(x, y).get(timeout=180, disable_sync_subtasks=False))


@app.task(name='late_part', acks_late=True, reject_on_worker_lost=True)
def late_part(number: int) -> int:
    """Return a number after a moment. The task runs again if its worker is killed."""
    time.sleep(0.05)
    return number


@app.task(name='collect')
def collect(numbers: list[int], journal: str, name: str) -> int:
    """Write `name` to the journal, and return the sum of the numbers."""
    note(journal, name)
    return sum(numbers)


@app.task(name='collected')
def collected(results: list[Any], journal: str) -> list[Any]:
    """Write a list of results to the journal, and return it."""
    note(journal, json.dumps(results))
    return results


def pause(journal: str, seconds: float | None) -> None:
    """Wait for `seconds`; if None, until the file `go on` exists next to the journal."""
    if seconds is not None:
        time.sleep(seconds)
    while seconds is None and not Path(journal).with_name('go on').exists():
        time.sleep(0.02)


_lock = threading.Lock()


def note(journal: str, line: str) -> None:
    """Append a line to the journal."""
    with _lock, Path(journal).open('a') as file:
        file.write(line + '\n')


@app.task(name='own_states', bind=True)
def own_states(self: Any) -> list[str]:
    """Store a state and return the states that the task itself reads."""
    result = app.AsyncResult(self.request.id)
    states = [result.state]
    self.update_state(state='HALF', meta={'done': 50})
    return [*states, result.state, app.AsyncResult(self.request.id).state]


@app.task(name='lineage', bind=True)
def lineage(self: Any, numbers: list[int]) -> list[Any]:
    """Return the ids of the parent and of the root, and the priority."""
    return [self.request.parent_id, self.request.root_id, self.request.delivery_info.get('priority')]
