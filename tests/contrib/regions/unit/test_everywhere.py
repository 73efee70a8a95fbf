"""Tasks in every region (`celery_couchdb.contrib.regions.everywhere`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, chain, chord, group

from celery_couchdb.contrib.regions import everywhere
from kombu_couchdb.errors import ConfigurationError


@pytest.fixture
def app() -> Celery:
    app = Celery('regions', broker='memory://', set_as_current=False)
    app.conf.broker_transport_options = {'region': 'us', 'regions': {'us': 'couchdb://us/r', 'eu': 'couchdb://eu/r'}}
    return app


@pytest.fixture
def sent(app: Celery, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """The first argument and the region of each task that is sent."""
    found = list[tuple[Any, Any]]()

    def send(producer: Any, name: str, message: Any, region: Any = None, **_: Any) -> None:
        found.append((message.body[0][0], region))

    monkeypatch.setattr(type(app.amqp), 'send_task_message', property(lambda self: send))
    return found


FORMS: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    'task': (lambda task: task(1), [1]),
    'group': (lambda task: group(task(1), task(2)), [1, 2]),
    'nested group': (lambda task: group(task(1), group(task(2), task(3))), [1, 2, 3]),
    'chain': (lambda task: task(1) | task(2), [1]),
    'chain of chains': (lambda task: chain(chain(task(1), task(2)), task(3)), [1]),
    'chain with a group later': (lambda task: task(1) | group(task(2), task(3)), [1]),
    'group of chains': (lambda task: group(task(1) | task(2), task(3)), [1, 3]),
}


@pytest.mark.parametrize('form', FORMS)
def test_every_first_task_is_sent_to_each_region(app: Celery, sent: list[tuple[Any, Any]], form: str) -> None:
    make, expected = FORMS[form]
    everywhere(make(lambda number: app.signature('add', (number,), app=app))).apply_async()
    assert sent == [(number, region) for region in ('eu', 'us') for number in expected]


def test_options_of_a_group_are_those_of_its_tasks(app: Celery) -> None:
    tasks = group(app.signature('add'), app.signature('add'), app=app).set(queue='news')
    assert [task.options for task in everywhere(tasks).tasks] == [
        {'queue': 'news', 'region': region} for region in ('eu', 'eu', 'us', 'us')
    ]
    assert all('region' not in task.options for task in tasks.tasks)


def test_chord_is_an_error(app: Celery) -> None:
    add = app.signature('add', (1,))
    for signature in (chord([add, add], add), group(add, add) | add, chain(group(add, add), add, app=app)):
        for outer in (signature, group(add, signature, app=app)):
            with pytest.raises(ConfigurationError, match='takes no chord'):
                everywhere(outer)
