"""The first use in a fresh process is like every later one: it needs as few requests, and the same checks apply."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.client import Client
from tests.support import items, run_python

#: A program that has imported Celery only. Each case runs in a fork of it, which has not used CouchDB before. It prints
#: how many requests its main thread sent to the broker's database, or the error. The requests that declare the queue of
#: the backend `rpc://` are not counted: that backend declares its queue before each task, with any broker.
PROGRAM = """
import http.client, json, os, sys, threading
import celery.backends.rpc, celery.backends.cache, requests  # which takes long, and is no part of these packages
from celery import Celery, chain, chord, group

put = http.client.HTTPConnection.putrequest
paths = []

def putrequest(self, method, url, *args, **kwargs):
    if threading.current_thread() is threading.main_thread():
        paths.append(url)
    return put(self, method, url, *args, **kwargs)

http.client.HTTPConnection.putrequest = putrequest

def publish(kind, count, broker, backend, options):
    app = Celery('shop', broker=broker, backend=backend)
    app.conf.broker_transport_options = options

    @app.task(name='add', shared=False)
    def add(left, right):
        return left + right

    tasks = [add.s(number, 1) for number in range(count)]
    {
        'group': lambda: group(tasks).apply_async(),
        'group of chains': lambda: group(chain(task, add.s(1)) for task in tasks).delay(),
        'generator': lambda: group(task for task in tasks).apply_async(),
        'chord': lambda: chord(tasks)(add.si(0, 0)),
        'chunks': lambda: add.chunks([(number, 1) for number in range(count)], 1).apply_async(),
        'elsewhere': lambda: chord([add.s(1, 1), add.s(1, 1).set(region='eu')])(add.si(0, 0)),
    }[kind]()

for case in json.loads(os.environ['CASES']):
    assert not [name for name in sys.modules if name.startswith(('kombu_couchdb.transport', 'celery_couchdb.backend'))]
    sys.stdout.flush()
    if not (child := os.fork()):
        try:
            publish(**case)
            start = '/' + case['broker'].rpartition('/')[2] + '/'
            print(len([path for path in paths if path.startswith(start) and 'broker%3Aqueue' not in path]), flush=True)
        except BaseException as exc:
            print(json.dumps(f'{type(exc).__name__}: {exc}'), flush=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
"""

Run = Callable[..., list[int | str]]


@pytest.fixture
def fresh(url: str, client: Client) -> Run:
    """A function that runs cases, each in a fresh process, and returns their numbers of requests, or errors."""

    def fresh(*cases: tuple[str, int, str | None], **options: object) -> list[int | str]:
        given = [
            {'kind': kind, 'count': count, 'broker': url, 'backend': backend, 'options': options}
            for kind, count, backend in cases
        ]
        return [json.loads(line) for line in run_python(PROGRAM, CASES=json.dumps(given)).stdout.splitlines()]

    return fresh


def test_requests_do_not_grow_with_the_number_of_tasks(fresh: Run, client: Client, server: Server) -> None:
    with server.fresh_database() as results:
        backend = server.couchdb_url(results)
        kinds = [
            *((kind, backend) for kind in ('group', 'generator', 'chord', 'chunks')),
            ('group of chains', None),
            ('group', 'rpc://'),
            ('chord', 'cache+memory://'),
        ]
        cases = [(kind, count, backend) for kind, backend in kinds for count in (2, 20)]
        _, *counts = fresh(('group', 1, backend), *cases)  # the first creates the databases and the queue
    assert len(counts) == len(cases)
    for kind, few, many in zip(kinds, counts[::2], counts[1::2], strict=True):
        assert int(many) < int(few) + 10, kind  # not equal: tasks of a generator are sent after 100 ms
    assert len(items(client)) == 1 + 22 * len(kinds)


def test_header_of_the_first_chord_is_checked(fresh: Run, client: Client) -> None:
    [error] = fresh(
        ('elsewhere', 2, 'cache+memory://'),
        region='de',
        regions={'de': 'couchdb://de.example.com/celery', 'eu': 'couchdb://eu.example.com/celery'},
    )
    assert 'the header of a chord runs in the region where the chord is sent' in str(error)
    assert items(client) == []
