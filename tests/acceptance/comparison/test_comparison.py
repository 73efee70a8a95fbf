"""Canvas, results, values and exceptions have the outcomes that they have on Redis.

`redis.json` has the outcomes on Redis. Where `REDIS_URL` is set and the package `redis` is installed, the scenarios run
there, too, so that the file is proven. This command writes the file anew::

    RECORD=1 REDIS_URL=redis://localhost/0 .venv/bin/python -m pytest tests/acceptance/comparison -k redis

Keys in that database begin with a random prefix, and are deleted at the end.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import celery
import pytest
from celery import _state

from celery_couchdb.testing import Server
from tests.acceptance.conftest import Site
from tests.conftest import PATIENCE, PATIENT, PATIENT_BROKER
from tests.support import end
from tests.worker_process import WorkerProcess

from .scene import CONFIGURATIONS, SCENARIOS, Scene
from .tasks import App

TABLE = Path(__file__).with_name('redis.json')
RECORD = bool(os.environ.get('RECORD'))
OUTCOMES: dict[str, dict[str, Any]] = json.loads(TABLE.read_text()) if TABLE.exists() else {}

REDIS_URL = os.environ.get('REDIS_URL', '')
BROKERS = ['couchdb', *(['redis'] if REDIS_URL and importlib.util.find_spec('redis') else [])]

UNSTORABLE = "'the document contains half of a surrogate pair, which cannot be encoded as UTF-8'"

#: Differences that are meant: the outcome on CouchDB. docs/explanation/differences.rst has the reasons.
INTENDED: dict[str, Any] = {
    f'{name}: value: {kind}': [stored, f'raises kombu_couchdb.errors.Unstorable({UNSTORABLE},) from UnicodeEncodeError']
    for name in CONFIGURATIONS
    for kind, stored in (('surrogate', r"str '\ud800'"), ('surrogate in a key', r"dict {'\udfff': 1}"))
}
WRAPPED = (
    "raises celery.utils.serialization.UnpickleableExceptionWrapper('builtins', 'GeneratorExit', (), 'GeneratorExit()')"
)
INTENDED |= {f'{name}: exception: GeneratorExit': [WRAPPED, 'the same', 'FAILURE', False] for name in ('json', 'yaml')}

#: What Celery before 5.7 does otherwise, on Redis as well: other results, an order that varies, or none at all. These
#: scenarios do not run with it, and neither do those of other serializers than JSON.
OLDER = {
    'canvas: chain in which a partial fails',
    'canvas: chain of chords',
    'canvas: chain of groups',
    'canvas: chord of chains that end with a group',
    'canvas: chord that fails before a chain',
    'canvas: chord that fails before a group',
    'canvas: chord with a body that is ignored, then a note',
    'canvas: errback on a chord in a chain',
    'canvas: errback on a chord whose body is a group',
    'canvas: errback that fails',
    'canvas: group of none in a chain',
    'canvas: reject',
    'canvas: reject in a header',
    'canvas: replace by a chain with a group',
    'canvas: replace by a group in a header',
    'canvas: replace in a group',
    'canvas: replace with a link',
    'results: lost process',
    *(name for name in SCENARIOS if name.startswith('exception')),
}

OPTIONS = ('broker_transport_options', 'result_backend_transport_options')

WORKER = {'app.py': b'from tests.acceptance.comparison.tasks import of_worker\napp = of_worker()\n'}


@pytest.fixture(scope='module')
def scene(
    request: pytest.FixtureRequest, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Scene, str, str]]:
    """A worker that all scenarios of a broker and a configuration share."""
    broker, name = request.param
    folder, keys = tmp_path_factory.mktemp('comparison'), {'global_keyprefix': f'test-{uuid.uuid4().hex[:12]}-'}
    notes = folder / 'notes'
    notes.touch()
    with ExitStack() as stack:
        database, results = (stack.enter_context(server.fresh_database()) for _ in range(2))
        site = stack.enter_context(closing(Site(server, database, results, folder)))
        options = [PATIENT_BROKER, PATIENT] if broker == 'couchdb' else [keys, keys]
        settings = {**CONFIGURATIONS[name], **dict(zip(OPTIONS, options, strict=True))}
        environment = {**site.environment, 'SETTINGS': json.dumps(settings), 'NOTES': str(notes), 'C_FORCE_ROOT': '1'}
        if broker == 'redis':
            environment |= {'BROKER_URL': REDIS_URL, 'RESULT_URL': REDIS_URL}
        app = App(environment, notes)
        stack.callback(end, app)
        stack.callback(_state.get_current_app().set_current)
        app.set_current()
        site.run(WorkerProcess.command('--pool', 'prefork', '--concurrency', '2'), environment, WORKER).ready()
        yield Scene(app), broker, name
        if broker == 'redis':
            site.workers[0].teardown()
            for key in app.backend.client.scan_iter(keys['global_keyprefix'] + '*'):
                app.backend.client.delete(key)
            app.backend.result_consumer.stop()
    if RECORD:
        tables = {name: ',\n'.join(map(_line, sorted(table.items()))) for name, table in sorted(OUTCOMES.items())}
        TABLE.write_text('{\n' + ',\n'.join(f'"{name}": {{\n{lines}\n}}' for name, lines in tables.items()) + '\n}\n')


def _line(item: tuple[str, Any]) -> str:
    name, outcome = item
    return f'{json.dumps(name)}: {json.dumps(outcome)}'


def check(scene: tuple[Scene, str, str], *names: str, patience: float) -> None:
    """Compare the outcomes of scenarios, which run at the same time, with the recorded ones."""
    stage, broker, configuration = scene
    if celery.VERSION[:2] < (5, 7):
        names = () if configuration != 'json' else tuple(name for name in names if name not in OLDER)
        if not names:
            pytest.skip('redis.json has the outcome with Celery 5.7')
    table = OUTCOMES.setdefault(configuration, {})
    stage.app.notes.write_text('')
    started = {name: stage.start(name) for name in names}
    if RECORD and broker == 'redis':
        table.update({name: stage.outcome(each) for name, each in started.items()})
        return
    expected = {name: table[name] for name in names}
    if broker == 'couchdb':
        expected |= {name: INTENDED[key] for name in names if (key := f'{configuration}: {name}') in INTENDED}
    if sys.version_info >= (3, 12):  # which shows such a value in another way
        expected = json.loads(json.dumps(expected).replace("([('b', 1), ('a', 2)])", "({'b': 1, 'a': 2})"))
    assert {name: stage.outcome(each, [expected[name]], patience) for name, each in started.items()} == expected


@pytest.mark.parametrize('name', [name for name in SCENARIOS if name.startswith(('canvas', 'results'))])
@pytest.mark.parametrize('scene', [(broker, 'json') for broker in BROKERS], ids='-'.join, indirect=True)
def test_outcome(scene: tuple[Scene, str, str], name: str) -> None:
    check(scene, name, patience=PATIENCE)


@pytest.mark.parametrize('kind', ['value', 'exception'])
@pytest.mark.parametrize(
    'scene', [(broker, name) for broker in BROKERS for name in CONFIGURATIONS], ids='-'.join, indirect=True
)
def test_values_and_exceptions(scene: tuple[Scene, str, str], kind: str) -> None:
    """What `get` returns or raises stays."""
    check(scene, *(name for name in SCENARIOS if name.startswith(kind)), patience=0.0)
