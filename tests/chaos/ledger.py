"""The ledger: one file in which all processes record events, one line of JSON each.

A process appends a line by a single `write` to a file opened with O_APPEND: the line stays if the process is killed
afterwards, and lines of several processes do not mix. Times are those of the monotonic clock, which all processes of a
machine share and no fault changes.

============ ===========================================================================================
Event        Members
============ ===========================================================================================
``accepted`` ``order``; ``keys``, the ids of its tasks; ``tries``, how often each runs by design; ``kind``;
             whether its tasks are acknowledged ``early``, and whether they store ``results``
``due``      ``key``, ``try``, ``at``: the time before which this try must not run
``received`` ``key``, ``try``, ``at``, ``worker``, ``delivery``: a worker received a message, identified by
             document and revision
``start``    the same, ``pid``, ``astray``: a run begins; whether the clock of the worker is wrong
``end``      the same; the run has ended
``stored``   ``keys``: the tasks with a result of success in the database when all workers have stopped
``told``     ``number``, ``at``: a publisher sent an event
``heard``    the same: the listener received it
``fault``    ``name``, ``began``, ``ended``; whether it ``interrupts`` runs, or is ``deadly`` to a process;
             ``workers``, the names of affected workers or places (null: all), and ``pid`` if it affects
             only one child; ``since``: runs that began earlier are not interrupted (null: all are);
             ``ahead``: how many seconds the server's clock was ahead
``machine``  as a fault: a worker was not scheduled by the operating system, or, with ``workers`` null, the
             process that all requests pass through
============ ===========================================================================================
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ['Event', 'Ledger', 'Progress']

Event = dict[str, Any]


class Ledger:
    """The file, for writing and reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def note(self, event: str, **members: Any) -> None:
        """Append an event."""
        line = json.dumps({'event': event, **members}, separators=(',', ':')) + '\n'
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    def new_events(self) -> list[Event]:
        """Return the events added since the last call."""
        if not self.path.exists():
            return []
        with self.path.open('rb') as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b'\n') + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


class Progress:
    """All events so far, and the figures that control a run."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.events: list[Event] = []
        #: The accepted orders, the keys of their tasks, and the keys of the tasks that have ended.
        self.orders: set[str] = set()
        self.accepted: set[str] = set()
        self.ended: set[str] = set()
        #: The number of the last event that the listener received; -1: none.
        self.heard = -1
        #: For each worker, the process id of the child that last began a run.
        self.children: dict[str, int] = {}

    def update(self) -> None:
        """Read the new events."""
        new = self._ledger.new_events()
        self.events += new
        for event in new:
            if event['event'] == 'accepted':
                self.orders.add(event['order'])
                self.accepted |= set(event['keys'])
            elif event['event'] == 'start':
                self.children[event['worker']] = event['pid']
            elif event['event'] == 'heard':
                self.heard = event['number']
            elif event['event'] == 'end':
                self.ended.add(event['key'])
