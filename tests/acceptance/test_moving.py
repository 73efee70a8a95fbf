"""Moving from another broker with `celery migrate`, as in docs/start/from-redis.rst."""

from __future__ import annotations

import uuid
from typing import Any

from celery import Celery

from tests.conftest import PATIENCE, wait_for
from tests.support import items

from .conftest import Site, celery


def migrate(source: str, destination: str) -> None:
    """Move the messages of two queues."""
    words = 'migrate --ack-messages --timeout 5 --queues celery,mails'
    done = celery(*words.split(), source, destination, BROKER_URL=source, RESULT_URL=destination)
    assert done.returncode == 0, done.stderr


def send(url: str) -> list[str]:
    """Send four tasks, one of them with a countdown, and return their ids."""
    app = Celery('old', set_as_current=False, broker=url)
    options: list[dict[str, Any]] = [{}, {'queue': 'mails'}, {'priority': 3}, {'countdown': 3600}]
    ids = [
        app.send_task('add', (number, 1), task_id=str(uuid.uuid4()), **option).id
        for number, option in enumerate(options)
    ]
    app.close()
    return ids


def test_migrate_from_redis(site: Site, redis: str) -> None:
    ids = send(redis)
    migrate(redis, site.environment['BROKER_URL'])
    found = {doc['message']['headers']['id']: doc for doc in items(site.client)}
    assert set(found) == set(ids)
    assert [found[task_id]['queue'] for task_id in ids] == ['celery', 'mails', 'celery', 'celery']
    assert found[ids[2]]['priority'] == 3
    assert found[ids[3]]['date'] > found[ids[3]]['published'] + 3000
    site.worker('-Q', 'celery,mails')
    assert [site.app.AsyncResult(task_id).get(timeout=PATIENCE) for task_id in ids[:3]] == [1, 2, 3]
    wait_for(lambda: [doc['message']['headers']['id'] for doc in items(site.client)] == [ids[3]], 'the acks')


def test_migrate_to_another_database(site: Site) -> None:
    """Ready messages are moved. Scheduled messages are not delivered, and therefore not moved."""
    ids = send(site.environment['BROKER_URL'])
    other = f'{site.database}-other'
    try:
        migrate(site.environment['BROKER_URL'], site.server.couchdb_url(other))
        assert {doc['message']['headers']['id'] for doc in items(site.server.client(other))} == set(ids[:3])
        assert [doc['message']['headers']['id'] for doc in items(site.client)] == [ids[3]]
    finally:
        site.server.client(other).delete()
