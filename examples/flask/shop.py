"""A shop in Flask: `flask --app shop run` serves it, and `celery -A shop worker` runs its tasks."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery, Task
from celery.result import AsyncResult
from flask import Flask, current_app, request

web = Flask(__name__)
web.config['TAX'] = 0.25


class TaskInContext(Task):
    """A task that may use `current_app`, and with it configuration and extensions, as a view does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task in the context of the web application."""
        with web.app_context():
            return self.run(*args, **kwargs)


app = Celery(
    'shop',
    broker=os.environ.get('CELERY_BROKER_URL', 'couchdb://user:password@localhost:5984/celery'),
    backend=os.environ.get('CELERY_RESULT_BACKEND', 'couchdb://user:password@localhost:5984/celery_results'),
    task_cls=TaskInContext,
)


@app.task
def invoice(amounts: list[float]) -> dict[str, float]:
    """Return what is to be paid."""
    net = sum(amounts)
    return {'net': net, 'gross': net * (1 + current_app.config['TAX'])}


@web.post('/invoices')
def order_invoice() -> tuple[dict[str, str], int]:
    """Have an invoice made."""
    return {'id': invoice.delay(request.get_json()['amounts']).id}, 202


@web.get('/invoices/<task_id>')
def show_invoice(task_id: str) -> dict[str, Any]:
    """Tell how far an invoice is."""
    result: AsyncResult[Any] = invoice.AsyncResult(task_id)
    return {'state': result.state, 'invoice': result.result if result.successful() else None}
