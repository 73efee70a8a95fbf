"""OpenTelemetry's instrumentation of Celery: the trace of the publisher continues in the tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group

pytest.importorskip('opentelemetry.instrumentation.celery')
pytest.importorskip('opentelemetry.sdk')

from opentelemetry.instrumentation.celery import CeleryInstrumentor

from celery_couchdb.jobs import Jobs
from kombu_couchdb.admin import dead
from tests.conftest import PATIENCE, wait_for
from tests.worker_process import WorkerProcess

from .conftest import Site

Span = dict[str, Any]


class Traced:
    """A site whose publisher, this process, and worker write their spans to one file."""

    def __init__(self, site: Site, folder: Path, begin: Callable[[str], AbstractContextManager[Any]]) -> None:
        self.site, self._path, self.begin = site, folder / 'spans', begin

    def start(self, pool: str = 'threads', **settings: Any) -> None:
        """Start a worker and wait until it is ready."""
        command = WorkerProcess.command('--pool', pool, '--concurrency', '2')
        environment = {
            **self.site.environment,
            'SETTINGS': json.dumps(settings),
            'SPANS': str(self._path),
            'TRACED_FROM': 'worker_process_init' if pool == 'prefork' else 'worker_init',
        }
        app = b'import tests.acceptance.traced\nfrom tests.acceptance.app import app'
        self.site.run(command, environment, {'app.py': app}).ready()

    def spans(self, *names: str) -> list[Span]:
        """Wait until as many spans with these names have ended, and their parents; return all spans in their order."""

        def found() -> list[Span]:
            spans = [json.loads(line) for line in self._path.read_text().splitlines()] if self._path.exists() else []
            ended, ids = [span['name'] for span in spans], {None, *(span['context']['span_id'] for span in spans)}
            has_all = all(ended.count(name) >= names.count(name) for name in names)
            return spans if has_all and all(span['parent_id'] in ids for span in spans) else []

        return sorted(wait_for(found, f'the spans {names}'), key=lambda span: str(span['start_time']))


@pytest.fixture
def traced(site: Site, tmp_path: Path) -> Iterator[Traced]:
    from .traced import trace

    provider = trace(tmp_path / 'spans')
    yield Traced(site, tmp_path, provider.get_tracer('test').start_as_current_span)
    CeleryInstrumentor().uninstrument()
    provider.shutdown()


def lineage(spans: list[Span], task_id: str, kind: str = 'run') -> list[str]:
    """Return the names of the spans from the last one of a task to the root, and check that they are one trace."""
    by_id = {span['context']['span_id']: span for span in spans}
    own = [
        span
        for span in spans
        if span['attributes'].get('messaging.message.id', span['attributes'].get('messaging.message_id')) == task_id
        and span['name'].startswith(f'{kind}/')
        and span['name'] != 'run/celery.chord_unlock'
    ]
    assert own, f'no span of {task_id} among {[span["name"] for span in spans]}'
    span, names = own[-1], []
    while True:
        assert span['context']['trace_id'] == own[-1]['context']['trace_id']
        names.append(span['name'])
        if span['parent_id'] is None:
            return names
        span = by_id[span['parent_id']]


@pytest.mark.parametrize('pool', ['threads', 'prefork'])
def test_tasks_continue_the_trace_of_their_publisher(traced: Traced, pool: str) -> None:
    """The body of a chord is sent by its last part, or by the task `celery.chord_unlock` with its request."""
    sent = ['apply_async/add', 'request']
    traced.start(pool)
    add, total = (traced.site.app.signature(name) for name in ('add', 'total'))
    with traced.begin('request'):
        parts = group(add.clone((i, 1)) for i in range(3)).apply_async()
        last = chain(add.clone((1, 2)), add.clone((3,)), add.clone((4,))).apply_async()
        body = chord([add.clone((i, 1)) for i in range(3)], total).apply_async()
    assert (parts.get(timeout=PATIENCE), last.get(timeout=PATIENCE)) == ([1, 2, 3], 10)
    assert body.get(timeout=PATIENCE) == 6
    spans = traced.spans(*['run/add'] * 9, 'run/total')
    for result in [*parts.results, *body.parent.results]:
        assert lineage(spans, result.id) == ['run/add', *sent]
    assert lineage(spans, last.id) == ['run/add', 'apply_async/add'] * 3 + ['request']
    start, publish, last_part, *rest = lineage(spans, body.id)
    assert (start, publish, rest) == ('run/total', 'apply_async/total', sent)
    assert last_part in ('run/add', 'run/celery.chord_unlock')


def test_replayed_dead_letter_continues_its_trace(traced: Traced) -> None:
    traced.start()
    site = traced.site
    with traced.begin('request'):
        result = site.send('refused', str(site.journal), 'a')
    wait_for(lambda: dead.count(site.client), 'the dead letter')
    site.journal.with_name('may pass').touch()
    jobs = Jobs(site.app)
    with traced.begin('replay'):
        jobs.replay(list(dead.letters(jobs.client)))
    wait_for(site.journalled, 'the task to run')
    spans = traced.spans('run/refused', 'run/refused')
    assert lineage(spans, result.id) == ['run/refused', 'apply_async/refused', 'request']
