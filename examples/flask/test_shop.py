"""Tests of the shop. A worker must run: `celery -A shop worker -l INFO`."""

from __future__ import annotations

from shop import invoice, web


def test_invoice() -> None:
    customer = web.test_client()
    ordered = customer.post('/invoices', json={'amounts': [10, 30]})
    assert ordered.status_code == 202
    task_id = ordered.get_json()['id']
    invoice.AsyncResult(task_id).get(timeout=60)  # wait for the result
    shown = customer.get(f'/invoices/{task_id}').get_json()
    assert shown == {'state': 'SUCCESS', 'invoice': {'net': 40, 'gross': 50}}
