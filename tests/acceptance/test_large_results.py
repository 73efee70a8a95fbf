"""Results that CouchDB refuses as too large, with the arguments beside them: each task has an outcome nevertheless."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from celery import chain, chord, group

from examples.managed.service import PLANS, Service
from tests.conftest import PATIENCE, wait_for

from .conftest import Site


def outcomes(site: Site, size: int) -> dict[str, tuple[Any, Any]]:
    """Return a signature and its outcome by name: a value, or the name of an exception. `size` is above the limit."""
    s, big = site.app.signature, 'x' * size

    def length(*data: str) -> Any:
        return s('length', data)

    return {
        'success': (length(big), size),
        'failure': (s('refuse', (big,)), 'ValueError'),
        'retry': (s('refuse_twice', (big,)), 'ValueError'),
        'time limit': (s('endless', (big,)), 'TimeLimitExceeded'),
        'lost process': (s('lost', (big,)), 'WorkerLostError'),
        'large error': (s('fail', (big,)), 'ResultTooLarge'),
        'large result': (s('text', (size,)), 'ResultTooLarge'),
        'group': (group([length(big), length('a')], app=site.app), [size, 1]),
        'chain': (chain(length(big), s('add', (1,)), app=site.app), size + 1),
        'chain that fails': (chain(s('refuse', (big,)), length(), app=site.app), 'ValueError'),
        'chord': (chord([length(big), length('a')], length(), app=site.app), 2),
        'chord with a large argument of its body': (chord([s('text', (size // 3,))] * 4, length(), app=site.app), 4),
        'chord of many results': (chord([s('text', (3000,))] * (size // 3000), length(), app=site.app), size // 3000),
        'chord with a failure': (chord([s('refuse', (big,)), length('a')], length(), app=site.app), 'ValueError'),
        'chord with a large error': (chord([s('fail', (big,)), length('a')], length(), app=site.app), 'ResultTooLarge'),
        'chord with a large result': (
            chord([s('text', (size,)), length('a')], length(), app=site.app),
            'ResultTooLarge',
        ),
    }


@pytest.mark.parametrize('size', [1_200_000, pytest.param(9_000_000, marks=pytest.mark.slow)])
def test_each_task_has_an_outcome(site: Site, stack: ExitStack, apache_couchdb: bool, size: int) -> None:
    """Behind a service with a limit of 1 MB, and of 10 MB for messages; and behind CouchDB's own of 8,000,000 bytes."""
    is_managed = size < 8_000_000
    if is_managed:
        site.set_up()
        url = stack.enter_context(Service(site.server.url, PLANS['unlimited'])).url.replace('http', 'couchdb', 1)
        site.use(f'{url}/{site.database}', f'{url}/{site.results}')
    elif not apache_couchdb:
        pytest.skip('the embedded server has no limit')
    cases, s = outcomes(site, size), site.app.signature
    if is_managed:
        too_much = chord([s('text', (1_000_000,))] * 12, s('length'), app=site.app)
        cases['chord with a body that is too large'] = too_much, 'DocumentTooLarge'
    site.worker(pool='prefork', result_extended=True, task_track_started=True)
    errback = s('noted', (str(site.journal),))
    results = {name: signature.on_error(errback).apply_async() for name, (signature, _) in cases.items()}
    found = {name: result.get(timeout=PATIENCE, propagate=False) for name, result in results.items()}
    wrong = {
        name: found[name]
        for name, (_, outcome) in cases.items()
        if not (outcome in repr(found[name]) if isinstance(outcome, str) else outcome == found[name])
    }
    assert not wrong
    failed = [results[name] for name, (_, outcome) in cases.items() if isinstance(outcome, str)]
    ids = {result.id for result in failed} - {results['chain that fails'].id} | {results['chain that fails'].parent.id}
    wait_for(lambda: ids <= {*site.journalled()}, 'the errbacks')
    failure = results['failure']
    assert failure.args.startswith("['xxx")
    assert 'shortened' in failure.args
    assert 'in refuse' in failure.traceback
