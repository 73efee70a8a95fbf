"""Results that are nested too deeply to be read, and forged exceptions."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import ChordError
from celery.utils.serialization import UnpickleableExceptionWrapper
from kombu.exceptions import DecodeError

from tests.conftest import PATIENCE, wait_for

from .worst import deep, store


def forged(levels: int) -> str:
    return (
        '{"_id": "celery-task-meta-t", "type": "Result", "status": "SUCCESS", "value": {"task_id": "t", '
        f'"status": "SUCCESS", "result": {deep(levels)}, "traceback": null, "children": []}}}}'
    )


@pytest.mark.skipif(sys.version_info >= (3, 12), reason='later Pythons read values that are nested as deeply')
@pytest.mark.parametrize('levels', [1000, 1400])
def test_unreadable_result_is_an_error_only_for_its_caller(app: Celery, levels: int) -> None:
    app.backend.store_result('good', 1, 'SUCCESS')
    store(app.backend.client, [forged(levels)])
    with pytest.raises(DecodeError, match='nested too deeply'):
        app.AsyncResult('t').get(timeout=PATIENCE)
    assert app.AsyncResult('good').get(timeout=PATIENCE) == 1
    app.AsyncResult('t').forget()
    app.backend.store_result('t', 2, 'SUCCESS')
    assert app.AsyncResult('t').get(timeout=PATIENCE) == 2


ENDS = [
    ('builtins', 'SystemExit', [1]),
    ('builtins', 'KeyboardInterrupt', []),
    ('celery.exceptions', 'WorkerShutdown', [0]),
    ('builtins', 'GeneratorExit', []),
]


def failed(app: Celery, task_id: str, module: str, name: str, args: list[Any]) -> None:
    app.backend.client.put(
        {
            '_id': f'celery-task-meta-{task_id}',
            'type': 'Result',
            'status': 'FAILURE',
            'value': {
                'task_id': task_id,
                'status': 'FAILURE',
                'traceback': None,
                'children': [],
                'result': {'exc_type': name, 'exc_module': module, 'exc_message': args},
            },
        }
    )


class Stopped(BaseException):
    """An exception of an application, which ends no program."""


@pytest.mark.parametrize('serializer', ['json', 'pickle'])
@pytest.mark.parametrize('error', [Stopped('now'), asyncio.CancelledError('now')], ids=repr)
def test_other_exceptions_come_back_with_their_class(app: Celery, serializer: str, error: BaseException) -> None:
    app.conf.update(result_serializer=serializer, result_accept_content=['json', 'pickle'])
    app.backend.mark_as_failure('t', error)
    with pytest.raises(type(error), match='now'):
        app.AsyncResult('t').get(timeout=PATIENCE)


@pytest.mark.parametrize(('module', 'name', 'args'), ENDS)
def test_forged_exception_does_not_end_the_caller(app: Celery, module: str, name: str, args: list[Any]) -> None:
    app.backend.store_result('good', 1, 'SUCCESS')
    failed(app, 't', module, name, args)
    with pytest.raises(UnpickleableExceptionWrapper, match=name):
        app.AsyncResult('t').get(timeout=PATIENCE)
    assert [result.get(timeout=PATIENCE) for result in [app.AsyncResult('good')]] == [1]
    heard: list[Any] = []
    app.AsyncResult('t').then(lambda result: None, on_error=heard.append)
    app.AsyncResult('good').then(heard.append)
    wait_for(lambda: len(heard) == 1, 'the callback')


@pytest.mark.parametrize(('module', 'name', 'args'), ENDS[:2])
def test_forged_exception_of_a_part_fails_the_chord(app: Celery, module: str, name: str, args: list[Any]) -> None:
    backend = app.backend
    backend.store_result('good', 1, 'SUCCESS')
    failed(app, 'part', module, name, args)
    part = {'_id': 'chord-unlock-g:part:00000000:part', 'task_id': 'part', 'state': 'FAILURE'}
    with pytest.raises(ChordError, match=name):
        backend._result_of(part, backend._read_results(['part']))
