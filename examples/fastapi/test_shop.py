"""Tests of the shop. A worker must run: `celery -A shop worker -l INFO`."""

from __future__ import annotations

import uuid

from fastapi.testclient import TestClient
from kombu.utils.url import parse_url
from shop import app, web

customer = TestClient(web)


def test_invoice() -> None:
    ordered = customer.post('/invoices', json={'amounts': [10, 30]})
    assert ordered.status_code == 202
    task_id = ordered.json()['id']
    shown = customer.get(f'/invoices/{task_id}', params={'wait': 30}).json()
    assert shown == {'state': 'SUCCESS', 'invoice': {'net': 40, 'gross': 50}}


def test_waiting_has_a_limit() -> None:
    shown = customer.get(f'/invoices/{uuid.uuid4()}', params={'wait': 0.1}).json()
    assert shown == {'state': 'PENDING', 'invoice': None}


def test_page_of_queues() -> None:
    """The page asks for a CouchDB user, and shows the queue of the worker."""
    assert customer.get('/celery').url.path == '/celery/login'
    login = parse_url(app.conf.broker_url)
    form = {'user': login['userid'], 'password': login['password']}
    assert customer.post('/celery/login', data=form).status_code == 200
    queues = customer.get('/celery/queues', params={'format': 'json'}).json()
    assert 'celery' in [queue['name'] for queue in queues]
