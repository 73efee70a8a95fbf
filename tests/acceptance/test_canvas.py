"""Groups, chains and chords."""

from __future__ import annotations

from typing import Any

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError

from kombu_couchdb.documents import workitem
from tests.conftest import PATIENCE, wait_for
from tests.support import items

from .conftest import Site


def test_canvas(site: Site) -> None:
    def task(name: str, *args: Any, **options: Any) -> Any:
        return site.app.signature(name, args, **options)

    incomplete = chord([task('add', 1, 1), task('add', 2, 2, expires=1)], app=site.app)(task('total'))
    wait_for(
        lambda: any(workitem.has_expired(doc, site.client.clock.now()) for doc in items(site.client)),
        'a part to expire before the worker starts',
    )
    site.worker()
    in_parallel = group([task('add', number, 1) for number in range(10)], app=site.app).delay()
    in_turn = chain(task('add', 1, 1), task('add', 10), task('add', 100), app=site.app).delay()
    with_end = chord([task('add', number, 0) for number in range(10)], app=site.app)(task('total'))
    nested = chain(task('add', 1, 1), group([task('add', 1), task('add', 2)]), task('total'), app=site.app).delay()
    large = chain(task('add', 1, 2), group([task('add', number) for number in range(30)]), app=site.app).delay()
    assert in_parallel.get(timeout=PATIENCE) == list(range(1, 11))
    assert in_turn.get(timeout=PATIENCE) == 112
    assert with_end.get(timeout=PATIENCE) == 45
    assert nested.get(timeout=PATIENCE) == 7
    assert large.get(timeout=PATIENCE) == [3 + number for number in range(30)]
    with pytest.raises(ChordError, match='TaskRevokedError'):
        site.app.AsyncResult(incomplete.id).get(timeout=PATIENCE)
    assert [part.state for part in incomplete.parent.results] == ['SUCCESS', 'REVOKED']
