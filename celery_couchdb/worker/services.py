"""The loops that a worker runs beside its tasks: those of optional rooms, each in a thread of its own."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from kombu_couchdb.leases.leader import Led
from kombu_couchdb.transport import Transport

from ..patches import workers
from ..rooms import rooms

__all__ = ['connect', 'start']

_running: WeakKeyDictionary[Any, list[Led]] = WeakKeyDictionary()


def connect() -> None:
    """Start the loops in each worker of this process that is ready from now on, and stop them when it shuts down."""
    for signal in workers.READY:
        signal.connect(start)
    for signal in workers.SHUTDOWN:
        signal.connect(_stop)


def start(sender: Any = None, **_: Any) -> None:
    """Start the loops for the app of a worker that is ready, unless they run, if its broker is CouchDB."""
    if sender is None or sender.app in _running:
        return
    app, concurrency = sender.app, getattr(getattr(sender, 'controller', None), 'concurrency', None) or 1
    with app.connection_for_write() as connection:  # does not connect
        if not issubclass(connection.get_transport_cls(), Transport):
            return
    found = {name: loop for room in rooms() for name, loop in room.services(app, concurrency).items()}
    _running[app] = [*found.values()]
    for name, loop in found.items():
        loop.start(name)


def _stop(sender: Any = None, **_: Any) -> None:
    for loop in _running.pop(sender.app, ()) if sender is not None else ():
        loop.stop()
