"""Results that CouchDB refuses as too large: what is stored in their place, in whatever way they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from celery import Celery, states
from celery.app.task import Context

from celery_couchdb.backend import CouchDBBackend, ResultTooLarge
from celery_couchdb.testing import Server
from kombu_couchdb.contrib.regions.region import returned
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.write_result import WriteResult
from tests.conftest import PATIENCE, PATIENT
from tests.regions import regions_on

#: Larger than the limit of these tests, which is 20,000 bytes.
LARGE = 'x' * 30_000


def limit(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let CouchDB refuse documents of more than 20,000 bytes of a client."""
    write = client.bulk

    def bulk(docs: Sequence[Document], *, texts: Sequence[bytes] | None = None) -> list[WriteResult]:
        return (
            [
                write([doc], texts=[text])[0]
                if len(text) < 20_000
                else WriteResult.refused(doc['_id'], 'document_too_large', 'too large')
                for doc, text in zip(docs, texts, strict=True)
            ]
            if texts
            else write(docs)
        )

    monkeypatch.setattr(client, 'bulk', bulk)


#: By name: a state, its value and traceback, whether the arguments are large, and the state and value that are stored.
CASES: dict[str, tuple[str, Any, Any, bool, str, Any]] = {
    'success': (states.SUCCESS, 3, None, True, states.SUCCESS, 3),
    'failure': (states.FAILURE, ValueError('no'), 'a traceback', True, states.FAILURE, ValueError),
    'long traceback': (states.FAILURE, ValueError('no'), f'first{LARGE}last', False, states.FAILURE, ValueError),
    'all of it': (states.FAILURE, ValueError(LARGE), f'first{LARGE}last', True, states.FAILURE, ResultTooLarge),
    'retry': (states.RETRY, ValueError(LARGE), 'a traceback', True, states.RETRY, ResultTooLarge),
    'revoked': (states.REVOKED, ValueError('no'), None, True, states.REVOKED, ValueError),
    'started': (states.STARTED, {'pid': 3}, None, True, states.STARTED, {'pid': 3}),
    'progress': ('PROGRESS', {'done': 3}, None, True, 'PROGRESS', {'done': 3}),
    'large progress': ('PROGRESS', {'done': LARGE}, None, False, states.PENDING, None),
}


@pytest.mark.parametrize('serializer', ['json', 'pickle'])
@pytest.mark.parametrize('is_handed_over', [True, False], ids=['handed over', 'stored by the task'])
def test_what_is_stored(
    url: str, monkeypatch: pytest.MonkeyPatch, client: Client, serializer: str, is_handed_over: bool
) -> None:
    app = Celery('test', set_as_current=False, broker='memory://', backend=url)
    accepted = ['json', 'pickle']
    app.conf.update(result_extended=True, result_serializer=serializer, result_accept_content=accepted)
    app.conf.result_backend_transport_options = PATIENT
    backend: CouchDBBackend = app.backend
    limit(backend.store.client, monkeypatch)
    if is_handed_over:
        backend.handover.open(serve_children=False)
    for name, (state, value, traceback, is_large, expected, stored) in CASES.items():
        args = [2**60, LARGE if is_large else 'short']
        request = Context(id=name, task='shop.export', args=args, kwargs={'text': args[1]}, hostname='worker')
        backend.store_result(name, value, state, traceback, request=request)
        for _ in range(4):
            backend.handover.queue.wait()  # also for what takes its place
        meta = backend.get_task_meta(name, cache=False)
        assert meta['status'] == expected, name
        found = meta['result']
        assert isinstance(found, stored) if isinstance(stored, type) else found == stored, name
        if isinstance(found, ResultTooLarge):
            assert 'of shop.export cannot be stored' in str(found)
        if expected == states.PENDING:
            continue
        assert (meta['worker'], 'shortened' in str(meta['args'])) == ('worker', is_large), name
        assert str(meta['args']).startswith(f'[{2**60}'), name
        if traceback and len(traceback) > 100:
            assert meta['traceback'].startswith('first')
            assert meta['traceback'].endswith('last')
        else:
            assert meta['traceback'] == traceback
    backend.handover.close()


@pytest.mark.parametrize('state', [states.SUCCESS, states.FAILURE])
def test_large_part_of_a_chord_without_a_result(
    url: str, client: Client, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """With `ignore_result` the part has the value."""
    app = Celery('test', set_as_current=False, broker='memory://', backend=url)
    backend: CouchDBBackend = app.backend
    limit(backend.store.client, monkeypatch)
    request = Context(id='part', group='group', group_index=0, chord={'task': 'total'}, ignore_result=True)
    if state == states.SUCCESS:  # Celery makes a failure of it
        with pytest.raises(ResultTooLarge):
            backend.mark_as_done('part', LARGE, request=request)
    else:
        backend.mark_as_failure('part', ValueError(LARGE), request=request, store_result=False)
        [part] = backend.chords.parts('group', ordered=True)
        assert (part['state'], part['value']['value']['result']['exc_type']) == (state, 'ResultTooLarge')


@pytest.mark.parametrize('state', [states.SUCCESS, states.FAILURE])
def test_large_result_that_returns_from_another_region(
    server: Server, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """The other region takes larger documents. Arguments and value are too large, each alone."""
    with regions_on(server, 'eu', 'us') as regions:
        us, eu = regions['us'], regions['eu']
        value = {'exc_type': 'ValueError', 'exc_module': 'builtins', 'exc_message': [LARGE]}
        meta = {'status': state, 'result': value, 'args': [LARGE], 'traceback': None, 'children': []}
        doc = eu.app.backend.result_document('large', 'shop.export', meta)
        eu.regions.bulk([returned('us', 'large', 'tag', doc, None, 1.0)])
        limit(us.app.backend.store.client, monkeypatch)
        regions.work('us')
        with pytest.raises(ResultTooLarge, match=r'of shop\.export cannot be stored'):
            us.app.AsyncResult('large').get(timeout=PATIENCE)
