"""Headers of chords stay in one region, in which their results are counted.

Nobody would count a task that ends in another region, and the body would never run. So it is an error to send a chord
if a task in its header, at any depth, names another region. A task that may run in any region runs at home.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from celery import canvas
from celery.canvas import Signature, maybe_signature

from kombu_couchdb.documents.region import ANY, named
from kombu_couchdb.errors import ConfigurationError

__all__ = ['install']

#: Celery's own method.
_run = canvas._chord.run


def _run_at_home(self: Any, header: Any, body: Any, *args: Any, app: Any = None, **options: Any) -> Any:
    """Send a chord; *raises* `ConfigurationError`, and sends nothing, if its header would run in another region."""
    app = app or self._get_app(body)
    if own := (app.conf.broker_transport_options or {}).get('region'):
        # Options of the chord are for all its tasks.
        given = named(
            {**self.options, **options}, {**(self.options.get('headers') or {}), **(options.get('headers') or {})}
        )
        if given not in (None, own, ANY):
            raise _refusal('celery.chord', given)
        if any([_check(app, step, own) for step in _steps(header, app)]) or given == ANY:
            header = header.clone()
            for step in _steps(header, app):
                step.options['region'] = own
            if given == ANY:
                options['region'] = own
    return _run(self, header, body, *args, app=app, **options)


def _check(app: Any, step: Signature, own: str) -> bool:
    """Return whether a step names the region `any`; *raises* `ConfigurationError` if it names another region."""
    route = app.amqp.router.route(dict(step.options), step.task, step.args, step.kwargs)
    region = named(route, route.get('headers'))
    if region not in (None, own, ANY):
        raise _refusal(step.task, region)
    return bool(region == ANY)


def _refusal(task: str, region: Any) -> ConfigurationError:
    return ConfigurationError(
        f'task {task!r:.200} of the header of a chord names region {region!r:.80}: headers of chords run in the region '
        f'where they are sent'
    )


def _steps(task: Any, app: Any) -> Iterator[Signature]:
    """Yield all tasks in a signature, at any depth."""
    pending = [task]  # a list, because nesting must not exhaust Python's stack
    while pending:
        found = maybe_signature(pending.pop(), app=app)
        if isinstance(found, (canvas._chain, canvas.group)):
            pending += found.tasks
        elif isinstance(found, canvas._chord):
            pending += [found.tasks, found.body]
        elif isinstance(found, Signature):
            yield found
        elif isinstance(found, (list, tuple)):
            pending += found


def install() -> None:
    """Replace Celery's method. The result backend calls this when it is imported."""
    canvas._chord.run = _run_at_home
