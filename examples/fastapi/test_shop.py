"""Tests of the shop. A worker must run: `celery -A shop worker`."""

from __future__ import annotations

import uuid

from fastapi.testclient import TestClient
from shop import web

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
