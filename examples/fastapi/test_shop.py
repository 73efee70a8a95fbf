"""The shop as its customers see it; a worker must run: `celery -A shop worker`."""

from __future__ import annotations

import uuid

from fastapi.testclient import TestClient
from shop import web

customer = TestClient(web)


def test_invoice() -> None:
    ordered = customer.post('/invoices', json={'amounts': [10, 30]})
    assert ordered.status_code == 202
    shown = customer.get(f'/invoices/{ordered.json()["id"]}', params={'wait': 30}).json()
    assert shown == {'state': 'SUCCESS', 'invoice': {'net': 40, 'gross': 50}}


def test_nobody_waits_for_ever() -> None:
    shown = customer.get(f'/invoices/{uuid.uuid4()}', params={'wait': 0.1}).json()
    assert shown == {'state': 'PENDING', 'invoice': None}
