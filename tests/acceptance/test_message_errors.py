"""Messages that cause errors in the worker's own process: each becomes a dead letter, and the worker goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import PATIENCE, wait_for
from tests.hostile.documents import WORKITEM
from tests.worker_process import WorkerProcess

from .conftest import APP, Site
from .test_command import couchdb, succeeded

HEADERS: dict[str, Any] = {'id': 'one', 'task': 'add', 'lang': 'py'}

#: By name: the members of a message that Celery cannot use.
HARMFUL: dict[str, dict[str, Any]] = {
    **{
        f'{name}={json.dumps(value)}': {'headers': {**HEADERS, name: value}}
        for name, value in [
            ('timelimit', ['x', 'y']),
            ('timelimit', 'abc'),
            ('timelimit', 5),
            ('timelimit', [1]),
            ('stamped_headers', [[1]]),
            ('expires', []),
            ('expires', 5),
            ('eta', {}),
            ('id', [1]),
            ('task', ['add']),
            ('task', None),
        ]
    },
    **{
        f'body={body}': {'headers': HEADERS, 'body': body}
        for body in ('5', 'null', '[]', '{}', '[1, 2]', '{"task": []}', '{')
    },
    'no headers': {'headers': {}},
    'no id': {'headers': {'task': 'add'}},
    'no task': {'headers': {'id': 'one'}, 'body': '5'},
    'protocol 1 without arguments': {'headers': {}, 'body': '{"task": "add"}'},
    'content-type': {'headers': HEADERS, 'content-type': [1]},
    'content-encoding': {'headers': HEADERS, 'content-encoding': 5},
}


def items() -> list[dict[str, Any]]:
    return [
        {**WORKITEM, '_id': f'{number:032x}', 'queue': 'celery', 'message': {**WORKITEM['message'], **message}}
        for number, message in enumerate(HARMFUL.values())
    ]


#: An app without results that imports nothing of these packages.
PLAIN = b"""
import os
from pathlib import Path
from celery import Celery

app = Celery('plain', broker=os.environ['BROKER_URL'])

@app.task(name='add')
def add(x, y):
    pass

@app.task(name='nap')
def nap(journal, name, seconds):
    Path(journal).write_text(f'end {name}')
"""


@pytest.mark.parametrize(('pool', 'app'), [('prefork', APP['app.py']), ('threads', PLAIN)], ids=['prefork', 'threads'])
def test_harmful_messages_become_dead_letters(site: Site, pool: str, app: bytes) -> None:
    site.set_up()
    docs = items()
    for doc in docs:
        site.client.put(doc)
    command = WorkerProcess.command('--pool', pool, '--concurrency', '2', '-l', 'INFO')
    worker = site.run(command, {**site.environment, 'SETTINGS': '{}'}, {'app.py': app})
    worker.ready()
    ids = [doc['_id'] for doc in docs]
    wait_for(lambda: all(doc and doc.get('status') for doc in site.client.find(ids)), 'the dead letters')
    site.send('nap', str(site.journal), 'good', 0)
    wait_for(lambda: 'end good' in site.journalled(), 'the good task')
    listed = [json.loads(line) for line in succeeded(couchdb(site, 'dead', 'list', '--json')).splitlines()]
    assert len(listed) == len(HARMFUL)
    assert all(1 < len(letter['reason']) <= 300 and '\n' not in letter['reason'] for letter in listed)
    assert worker.container.terminate(PATIENCE) == 0
    assert 'Unrecoverable' not in worker.logs()
