"""Results that are nested more deeply than anybody can read, or than most can."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from kombu.exceptions import DecodeError

from kombu_couchdb.errors import NestedTooDeeply
from tests.conftest import PATIENCE

from .worst import deep, store


def forged(levels: int) -> str:
    return ('{"_id": "celery-task-meta-t", "type": "Result", "status": "SUCCESS", "value": {"task_id": "t", "status": "SUCCESS", '
            f'"result": {deep(levels)}, "traceback": null, "children": []}}}}')


@pytest.mark.parametrize('levels', [1000, 1400])
def test_one_that_nobody_can_read_is_an_error_for_who_asks(app: Celery, levels: int) -> None:
    app.backend.store_result('good', 1, 'SUCCESS')
    store(app.backend.client, [forged(levels)])
    with pytest.raises((NestedTooDeeply, DecodeError)):
        app.AsyncResult('t').get(timeout=PATIENCE)
    assert app.AsyncResult('good').get(timeout=PATIENCE) == 1


@pytest.mark.parametrize('levels', [600, 1400])
def test_one_that_was_forged_gives_way_to_the_failure_or_is_forgotten(app: Celery, levels: int) -> None:
    app.backend.store_result('good', 1, 'SUCCESS')
    store(app.backend.client, [forged(levels)])
    app.AsyncResult('t').forget()
    app.backend.store_result('t', 2, 'SUCCESS')
    assert app.AsyncResult('t').get(timeout=PATIENCE) == 2


def test_one_that_cannot_be_read_is_written_over(app: Celery) -> None:
    app.backend.store_result('good', 1, 'SUCCESS')
    store(app.backend.client, [forged(1400)])
    app.backend.store_result('t', 2, 'SUCCESS')
    assert app.AsyncResult('t').get(timeout=PATIENCE) == 2


def test_what_a_task_returns_may_be_deep(app: Celery) -> None:
    value: Any = 1
    for _ in range(300):
        value = [value]
    app.backend.store_result('t', value, 'SUCCESS')
    assert app.AsyncResult('t').get(timeout=PATIENCE) == value
    assert isinstance(app.backend.client.get('celery-task-meta-t')['value'], str)
