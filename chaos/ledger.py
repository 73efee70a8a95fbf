"""The ledger: one file, in which every process notes what happens, a line of JSON each.

A line is appended by a single `write` to a file opened with O_APPEND: who is killed afterwards cannot take it back, and lines of
several processes do not mix. Times are those of the monotonic clock, which all processes of a machine share and no fault shifts.

============ =======================================================================================================
Event        Members
============ =======================================================================================================
``accepted`` ``order``; ``keys``, the ids of its tasks; ``tries``, how often each runs on purpose; ``kind``
``due``      ``key``, ``try``, ``at``: the time before which that try must not run
``received`` ``key``, ``try``, ``at``, ``worker``, ``delivery``: a worker was given a message, of this document and revision
``start``    the same, ``pid``, ``astray``: a run begins; whether the worker's clock is wrong
``end``      the same; the run has come to its end
``told``     ``number``, ``at``: an event was sent
``heard``    the same: the listener was given it
``fault``    ``name``, ``began``, ``ended``; whether it ``interrupts`` runs, or is ``deadly`` to a process; ``workers``, those or
             their places that were hit (null: all), and ``pid``, if only one child was; ``since``: no run that began before
             is interrupted (null: all are); ``ahead``: seconds by which the server's clock was ahead
``machine``  as a fault: a worker, or for all the process that is their network, found that the machine had not let it run
============ =======================================================================================================
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ['Event', 'Ledger', 'Progress']

Event = dict[str, Any]


class Ledger:
    """The file, for writing and for reading."""

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

    def news(self) -> list[Event]:
        """Return the events since the last call."""
        if not self.path.exists():
            return []
        with self.path.open('rb') as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b'\n') + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


class Progress:
    """All events so far, and the figures by which a run is conducted."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.events: list[Event] = []
        #: The orders that were accepted, the tasks in them, and the tasks that have ended, by their keys.
        self.orders: set[str] = set()
        self.accepted: set[str] = set()
        self.ended: set[str] = set()
        #: The number of the last event that the listener was given; -1 is none.
        self.heard = -1
        #: The child in which each worker last began a run.
        self.children: dict[str, int] = {}

    def update(self) -> None:
        """Take in what is new."""
        news = self._ledger.news()
        self.events += news
        for event in news:
            if event['event'] == 'accepted':
                self.orders.add(event['order'])
                self.accepted |= set(event['keys'])
            elif event['event'] == 'start':
                self.children[event['worker']] = event['pid']
            elif event['event'] == 'heard':
                self.heard = event['number']
            elif event['event'] == 'end':
                self.ended.add(event['key'])
