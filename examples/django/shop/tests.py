"""Tests of the shop. A worker must run on the test database:

`DATABASE=test.sqlite3 celery -A shop worker -l INFO`
"""

from __future__ import annotations

from typing import Any

from celery.signals import before_task_publish
from django.test import SimpleTestCase, TransactionTestCase
from kombu.utils.url import parse_url
from starlette.testclient import TestClient

from .asgi import application
from .celery import app
from .models import Order


class OrderTest(TransactionTestCase):
    """Not `TestCase`: it does not commit, so no task would be sent."""

    def test_order_is_confirmed(self) -> None:
        """A worker confirms an order."""
        answer = self.client.post('/orders/', {'customer': 'Zoë', 'amount': 40})
        assert answer.status_code == 202
        sent = answer.json()
        shown = self.client.get(f'/tasks/{sent["task"]}/', {'wait': 30}).json()
        assert shown == {'state': 'SUCCESS', 'text': 'Dear Zoë, 40 are to be paid.'}
        assert Order.objects.get(pk=sent['order']).confirmed

    def test_invalid_order_sends_no_task(self) -> None:
        """An invalid order is not stored, and its task is not sent."""
        sent: list[str] = []

        def note(sender: str, **_: Any) -> None:
            sent.append(sender)

        before_task_publish.connect(note)
        answer = self.client.post('/orders/', {'customer': 'Zoë', 'amount': 0})
        assert answer.status_code == 400
        assert not Order.objects.exists()
        assert not sent


class PageTest(SimpleTestCase):
    """The page of queues, which an ASGI server serves beside the shop."""

    def test_page_of_queues(self) -> None:
        """The page asks for a CouchDB user, and shows the queue of the worker."""
        admin = TestClient(application, base_url='http://localhost')
        assert admin.get('/celery').url.path == '/celery/login'
        login = parse_url(app.conf.broker_url)
        form = {'user': login['userid'], 'password': login['password']}
        assert admin.post('/celery/login', data=form).status_code == 200
        queues = admin.get('/celery/queues', params={'format': 'json'}).json()
        assert 'celery' in [queue['name'] for queue in queues]
        assert admin.get('/orders/').status_code == 405  # the shop is beside it
