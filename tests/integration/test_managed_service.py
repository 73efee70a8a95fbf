"""The fake of a managed service, see `examples.managed.service`, before the server of the tests."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import requests

from celery_couchdb.testing import Server
from examples.managed.service import PLANS, TOKENS, Service
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.pacing import RequestKind
from tests.conftest import PATIENCE, wait_for

KEY = 'the-api-key'


class Services:
    """Makes services before the server of the tests, and requests to its database through them."""

    def __init__(self, server: Server, database: str, stack: ExitStack) -> None:
        self._server, self._database, self._stack = server, database, stack

    def __call__(self, plan: str = 'unlimited', **options: Any) -> Service:
        return self._stack.enter_context(Service(self._server.url, PLANS[plan], **options))

    def send(self, service: Service, method: str, path: str = '', **options: Any) -> requests.Response:
        return requests.request(method, f'{service.url}/{self._database}{path}', timeout=PATIENCE, **options)


@pytest.fixture
def services(server: Server, client: Client, database: str) -> Iterator[Services]:
    with ExitStack() as stack:
        yield Services(server, database, stack)


def test_requests_reach_couchdb_and_are_counted(services: Services, database: str) -> None:
    service = services()
    docs = [{'_id': f'doc{number}', 'text': 'ü'} for number in range(3)]
    assert services.send(service, 'POST', '/_bulk_docs', json={'docs': docs}).status_code == 201
    with requests.Session() as session:  # one connection
        for _ in range(2):
            response = session.get(f'{service.url}/{database}/doc1', timeout=PATIENCE)
            assert response.json()['text'] == 'ü'
    assert services.send(service, 'HEAD', '/doc1').status_code == 200
    assert services.send(service, 'GET', '/missing').status_code == 404
    counts = requests.get(f'{service.url}/_counts', timeout=PATIENCE).json()
    assert counts['units'] == {'write': 3, 'read': 4}
    assert counts['busiest']['write'] == 3
    assert {(line['method'], line['database'], line['place'], line['requests']) for line in counts['requests']} == {
        ('POST', database, '_bulk_docs', 1),
        ('GET', database, 'document', 3),
        ('HEAD', database, 'document', 1),
    }
    service.restart_counts()
    assert not service.snapshot()['units']


def test_a_changes_feed_is_forwarded_as_it_comes(services: Services) -> None:
    service = services()
    since = services.send(service, 'GET').json()['update_seq']
    response = services.send(
        service, 'GET', '/_changes', params={'feed': 'longpoll', 'since': since, 'heartbeat': 1000}, stream=True
    )
    pieces = response.iter_content(None)
    assert not next(pieces).strip().strip(b'{"results":[')  # the feed has begun, and there is no change yet
    services.send(service, 'PUT', '/doc', json={})
    assert b'"doc"' in b''.join(pieces)
    assert service.snapshot()['units'] == {'feed': 1, 'write': 1, 'other': 1}


def test_a_feed_ends_with_the_service(services: Services) -> None:
    service, errors = services(), list[Exception]()

    def follow() -> None:
        try:
            services.send(service, 'GET', '/_changes', params={'feed': 'longpoll', 'since': 'now', 'heartbeat': 1000})
        except requests.RequestException as exc:
            errors.append(exc)

    thread = threading.Thread(target=follow)
    thread.start()
    wait_for(lambda: service.snapshot()['units'], 'the feed')
    service.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize('retry_after', [None, 2])
def test_requests_over_the_limit_are_refused(services: Services, retry_after: int | None) -> None:
    service = services('lite', retry_after=retry_after)
    docs = [{'_id': f'doc{number}'} for number in range(100)]
    assert services.send(service, 'POST', '/_bulk_docs', json={'docs': docs}).status_code == 201
    refused = services.send(service, 'PUT', '/one', json={})
    assert (refused.status_code, refused.json()['error']) == (429, 'too_many_requests')
    assert refused.headers.get('Retry-After') == (None if retry_after is None else str(retry_after))
    assert services.send(service, 'GET', '/doc1').status_code == 200  # another kind
    assert services.send(service, 'GET', '/one').status_code == 404  # what is refused is not executed
    assert service.counts.refused == {RequestKind.WRITE: 1}
    assert services.send(service, 'PUT', '/one', json={}).status_code == 429
    assert len(service.counts.refused_again) == 1


def test_what_is_not_offered_is_refused(services: Services) -> None:
    service = services()
    for method, path in [
        ('POST', '/_purge'),
        ('POST', '/_compact'),
        ('POST', '/_compact/ddoc'),
        ('POST', '/_view_cleanup'),
        ('PUT', '/_revs_limit'),
        ('GET', '/_purged_infos_limit'),
    ]:
        response = services.send(service, method, path, json={})
        assert (response.status_code, response.json()['error']) == (403, 'forbidden'), path
    for path in ('/_node/_local/_config', '/_cluster_setup', '/_membership', '/_users/org.couchdb.user%3Ax'):
        assert requests.get(service.url + path, timeout=PATIENCE).status_code == 403, path
    assert requests.post(f'{service.url}/_session', json={}, timeout=PATIENCE).status_code == 403
    assert services.send(service, 'GET').status_code == 200

    service = services(not_offered=re.compile(r'GET /[^/]+/_security'), not_offered_status=501)
    assert services.send(service, 'GET', '/_security').status_code == 501


def test_large_documents_are_refused(services: Services) -> None:
    service = services()
    large = {'_id': 'large', 'text': 'x' * 1_100_000}
    assert services.send(service, 'PUT', '/large', json=large).json() == {
        'error': 'document_too_large',
        'reason': 'large',
    }
    response = services.send(service, 'POST', '/_bulk_docs', json={'docs': [{'_id': 'small'}, large]})
    assert response.status_code == 413
    # The limit is for each document, without its attachments.
    docs = [{'_id': name, 'text': 'x' * 600_000} for name in 'ab']
    assert services.send(service, 'POST', '/_bulk_docs', json={'docs': docs}).status_code == 201
    attached = {'_attachments': {'file': {'content_type': 'text/plain', 'data': 'eHh4' * 500_000}}}
    assert services.send(service, 'PUT', '/attached', json=attached).status_code == 201
    attached['_attachments']['file']['data'] *= 8
    assert services.send(service, 'PUT', '/refused', json=attached).json()['error'] == 'attachment_too_large'


def test_tokens_are_needed_and_end(services: Services) -> None:
    service = services(api_key=KEY, token_seconds=0.5)
    assert '@' not in service.url

    def ask(**fields: str) -> requests.Response:
        form = {'grant_type': 'urn:ibm:params:oauth:grant-type:apikey', 'apikey': KEY, **fields}
        return requests.post(service.url + TOKENS, data=form, timeout=PATIENCE)

    assert 'could not be found' in ask(apikey='wrong').json()['errorMessage']
    assert ask(grant_type='password').status_code == 400
    assert services.send(service, 'GET').status_code == 401
    assert services.send(service, 'GET', auth=('admin', 'secret')).status_code == 401
    assert services.send(service, 'GET', headers={'Authorization': 'Bearer wrong'}).status_code == 401
    assert service.tokens is not None
    service.tokens.seconds = PATIENCE
    granted = ask().json()
    valid = {'Authorization': f'Bearer {granted["access_token"]}'}
    assert granted['expires_in'] == PATIENCE
    assert services.send(service, 'GET', headers=valid).json()['db_name']
    service.tokens.revoke()
    assert services.send(service, 'GET', headers=valid).status_code == 401
    service.tokens.seconds = 0.01
    valid = {'Authorization': f'Bearer {ask().json()["access_token"]}'}
    time.sleep(0.02)
    assert services.send(service, 'GET', headers=valid).status_code == 401
    assert service.tokens.count == 2


def test_what_the_endpoint_does_not_take_is_a_bad_request(services: Services) -> None:
    service = services()
    for body in (b'{', b'[]', json.dumps({'docs': 3}).encode()):
        assert services.send(service, 'POST', '/_bulk_docs', data=body).status_code == 400
