"""The shop as its customers see it; a worker must run on the test database: `DATABASE=test.sqlite3 celery -A shop worker`."""

from __future__ import annotations

from typing import Any

from celery.result import AsyncResult
from celery.signals import before_task_publish
from django.test import TransactionTestCase

from .models import Order


class OrderTest(TransactionTestCase):
    """Not `TestCase`, which commits nothing: neither would a task be sent, nor would the worker see the order."""

    def test_an_order_is_confirmed(self) -> None:
        """What is ordered is confirmed by a worker."""
        taken = self.client.post('/orders/', {'customer': 'Zoë', 'amount': 40})
        assert taken.status_code == 202
        AsyncResult(taken.json()['task']).get(timeout=60)  # returns as soon as the result is there
        shown = self.client.get(f'/tasks/{taken.json()["task"]}/').json()
        assert shown == {'state': 'SUCCESS', 'text': 'Dear Zoë, 40 are to be paid.'}
        assert Order.objects.get(pk=taken.json()['order']).confirmed

    def test_an_order_that_is_refused_is_forgotten(self) -> None:
        """Neither the order is stored nor its task sent."""
        sent: list[str] = []

        def note(sender: str, **_: Any) -> None:
            sent.append(sender)

        before_task_publish.connect(note)
        assert self.client.post('/orders/', {'customer': 'Zoë', 'amount': 0}).status_code == 400
        assert not Order.objects.exists()
        assert not sent
