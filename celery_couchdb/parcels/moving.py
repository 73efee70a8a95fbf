"""The start of the threads of a worker that move parcels: from publishers, and from other regions.

If this module is imported (see `hooks`), they start in each worker whose transport has the option `parcels`
or `region`, when the worker is ready.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from kombu_couchdb.leases.leader import Led
from kombu_couchdb.transport import Transport

from ..patches import workers
from .mover import Mover

#: The movers, by the transport option with which they start. They get the app, the connected transport, a function that
#: wakes their thread, and how many tasks the worker runs at once.
KINDS: dict[str, Callable[..., Mover]] = {
    'parcels': lambda app, transport, wake, concurrency: Mover(app, transport, wake)
}

_threads: WeakKeyDictionary[Any, list[Led]] = WeakKeyDictionary()


def start(app: Any, concurrency: int = 1) -> None:
    """Start the threads for an app, unless they run, if its broker is CouchDB and has `parcels` or `region`.

    The worker runs up to `concurrency` tasks at once.
    """
    options = app.conf.broker_transport_options or {}
    wanted = [kind for option, kind in KINDS.items() if options.get(option)]
    if app in _threads or not wanted:
        return
    with app.connection_for_write() as connection:
        if issubclass(connection.get_transport_cls(), Transport):
            _threads[app] = [_started(app, kind, concurrency) for kind in wanted]


def _started(app: Any, kind: Callable[..., Mover], concurrency: int) -> Led:
    led = Led(
        app.connection_for_write(),
        lambda connection, wake: kind(app, connection.connection, wake, concurrency),
        'parcels are not moved',
    )
    led.start('celery-couchdb-parcels')
    return led


def on_worker_ready(sender: Any = None, **_: Any) -> None:
    """Start the threads for a worker that is ready."""
    if sender is not None:
        controller = getattr(sender, 'controller', None)
        start(sender.app, getattr(controller, 'concurrency', None) or 1)


def _on_worker_shutdown(sender: Any = None, **_: Any) -> None:
    for thread in _threads.pop(sender.app, ()) if sender is not None else ():
        thread.stop()


for signal in workers.READY:
    signal.connect(on_worker_ready)
for signal in workers.SHUTDOWN:
    signal.connect(_on_worker_shutdown)
