"""Headers of chords stay in one region, in which their results are counted.

Nobody would count a task that ends in another region, and the body would never run. So it is an error to send a chord
if a task in its header, at any depth, names another region.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from celery import canvas
from celery.canvas import Signature, maybe_signature

from kombu_couchdb.documents.region import ANY, named
from kombu_couchdb.errors import ConfigurationError

__all__ = ['check']


def check(app: Any, tasks: Iterable[Any], options: Mapping[str, Any]) -> None:
    """Check tasks of a chord's header; `options` override those of the tasks.

    *Raises* `ConfigurationError` if one would run in another region. (One that may run in any region runs at home.)
    """
    if own := (app.conf.broker_transport_options or {}).get('region'):
        for step in _steps(tasks, app):
            route = app.amqp.router.route({**step.options, **options}, step.task, step.args, step.kwargs)
            region = named(route, route.get('headers'))
            if region not in (None, own, ANY):
                raise ConfigurationError(
                    f'task {step.task!r:.200} of the header of a chord names region {region!r:.80}: the header of a '
                    f'chord runs in the region where the chord is sent'
                )


def _steps(tasks: Iterable[Any], app: Any) -> Iterator[Signature]:
    """Yield all tasks in signatures, at any depth."""
    pending = list(tasks)  # a list, because nesting must not exhaust Python's stack
    while pending:
        found = maybe_signature(pending.pop(), app=app)
        if isinstance(found, (canvas._chain, canvas.group)):
            pending += found.tasks
        elif isinstance(found, canvas._chord):
            pending += [found.tasks, found.body]
        elif isinstance(found, Signature):
            yield found
