"""A shop in Flask. Start it with `flask --app shop run` and `celery -A shop worker -l INFO`."""

from __future__ import annotations

from typing import Any

from celery import Celery, Task
from celery.result import AsyncResult
from flask import Flask, current_app, request

web = Flask(__name__)
web.config['TAX'] = 0.25


class TaskInContext(Task):
    """A task that runs in an application context, so that it can use `current_app`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task in the application context."""
        with web.app_context():
            return self.run(*args, **kwargs)


app = Celery(
    'shop',
    broker='couchdb://user:password@localhost:5984/celery',
    backend='couchdb://user:password@localhost:5984/celery_results',
    task_cls=TaskInContext,
)
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    result_backend_always_retry=True,
    broker_connection_retry_on_startup=True,
)


@app.task
def invoice(amounts: list[float]) -> dict[str, float]:
    """Return the net and the gross amount of an invoice."""
    net = sum(amounts)
    return {'net': net, 'gross': net * (1 + current_app.config['TAX'])}


@web.post('/invoices')
def order_invoice() -> tuple[dict[str, str], int]:
    """Send the task that makes the invoice."""
    return {'id': invoice.delay(request.get_json()['amounts']).id}, 202


@web.get('/invoices/<task_id>')
def show_invoice(task_id: str) -> dict[str, Any]:
    """Return the state of the task, and the invoice if it is ready."""
    result: AsyncResult[Any] = invoice.AsyncResult(task_id)
    ready = result.successful()
    return {'state': result.state, 'invoice': result.result if ready else None}
