"""The app of the deployment examples: no URL, user or password is in the code.

Celery itself reads the URLs from `CELERY_BROKER_URL` and `CELERY_RESULT_BACKEND`. The option `credentials` reads the
user from `COUCHDB_USER`, and the password from `COUCHDB_PASSWORD` or from the file that `COUCHDB_PASSWORD_FILE` names.
"""

from __future__ import annotations

from celery import Celery

app = Celery('shop')
app.conf.update(
    # A task whose worker or pool process is killed runs again.
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    # Results wait for CouchDB, and so does a worker that starts before CouchDB.
    result_backend_always_retry=True,
    broker_connection_retry_on_startup=True,
    broker_transport_options={'credentials': 'environment'},
    result_backend_transport_options={'credentials': 'environment'},
)


@app.task
def add(x: int, y: int) -> int:
    """Return the sum of two numbers."""
    return x + y
