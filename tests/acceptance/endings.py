"""Ways in which a task can end, and an app that has a task for each."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from celery import Celery, Task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

app = Celery('endings', broker=os.environ.get('BROKER_URL'), backend=os.environ.get('RESULT_URL'))
app.conf.update(json.loads(os.environ.get('SETTINGS', '{}')))


class Unprintable(Exception):
    """An exception that cannot be pickled and has no text."""

    def __init__(self, *args: Any) -> None:
        super().__init__(lambda: None)

    def __str__(self) -> str:
        raise ValueError('it has no text')


@app.task(name='succeed')
def succeed(number: int = 5) -> int:
    """Return the number."""
    return number


@app.task(name='raise')
def raise_(text: str = 'no') -> None:
    """Fail."""
    raise ValueError(text)


class Careless(Task):
    """A task whose own handler of failures fails."""

    def on_failure(self, *args: Any) -> None:
        """Fail."""
        raise RuntimeError('in on_failure')


@app.task(name='raise_twice', base=Careless)
def raise_twice() -> None:
    """Fail, and fail again."""
    raise ValueError('no')


@app.task(name='unprintable')
def unprintable() -> None:
    """Fail with an exception without a text."""
    raise Unprintable


@app.task(name='huge')
def huge() -> None:
    """Fail with a text that is too long to be stored, and half of a surrogate pair."""
    raise ValueError('\ud800' + 'x' * 1_000_000)


@app.task(name='exit')
def exit_() -> None:
    """End the process; without a process of its own, only the task ends."""
    sys.exit(1)


@app.task(name='ignore')
def ignore() -> None:
    """Raise `Ignore`."""
    raise Ignore


@app.task(name='reject')
def reject() -> None:
    """Reject the message for good."""
    raise Reject('not now', requeue=False)


@app.task(name='requeue', bind=True)
def requeue(self: Any) -> None:
    """Reject the message with requeue, and succeed in the next delivery."""
    if not self.request.delivery_info['redelivered']:
        raise Reject('not yet', requeue=True)


@app.task(name='retry', bind=True, max_retries=3)
def retry(self: Any, times: int) -> None:
    """Retry a number of times, and succeed after that."""
    if self.request.retries < times:
        raise self.retry(countdown=0, exc=KeyError('retried'))


@app.task(name='replace', bind=True)
def replace(self: Any, name: str) -> None:
    """Replace the task by another one."""
    raise self.replace(app.signature(name))


@app.task(name='sleep')
def sleep() -> None:
    """Run until somebody ends it."""
    time.sleep(600)


@app.task(name='soft_limit', soft_time_limit=0.1)
def soft_limit() -> None:
    """Run until the soft time limit."""
    time.sleep(60)


@app.task(name='handled_limit', soft_time_limit=0.1)
def handled_limit() -> None:
    """End well after the soft time limit."""
    try:
        time.sleep(60)
    except SoftTimeLimitExceeded:
        pass


@app.task(name='hard_limit', time_limit=1)
def hard_limit() -> None:
    """Run until the time limit ends the process."""
    time.sleep(60)


@app.task(name='lost')
def lost() -> None:
    """Kill the current process."""
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(name='lost_and_retried', bind=True, reject_on_worker_lost=True)
def lost_and_retried(self: Any) -> None:
    """Kill the current process in the first delivery."""
    if not self.request.delivery_info['redelivered']:
        os.kill(os.getpid(), signal.SIGKILL)
