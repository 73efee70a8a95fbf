"""Broadcast queues, as in Celery's documentation."""

from __future__ import annotations

from celery import Celery

from tests.conftest import PATIENT_BROKER, wait_for

from .conftest import Site

#: A worker whose own queue is bound to the exchange `everybody`.
APP = b"""
import json, os
from pathlib import Path
from celery import Celery
from kombu.common import Broadcast

app = Celery('broadcast', broker=os.environ['BROKER_URL'], backend=os.environ['RESULT_URL'])
app.conf.task_queues = (Broadcast('everybody'),)


@app.task(name='reload', bind=True, ignore_result=True)
def reload(self, journal, name):
    with open(journal, 'a') as file:
        file.write(f'{self.request.hostname} {name}\\n')
"""


def test_publisher_with_task_routes_only(site: Site) -> None:
    """Celery assumes a direct exchange there, and does not declare it."""
    command = [
        'celery',
        '-A',
        'app',
        'worker',
        '-l',
        'info',
        '-P',
        'threads',
        '-c',
        '1',
        '--without-gossip',
        '--without-mingle',
    ]
    for name in ('one', 'two'):
        site.run([*command, '-n', f'{name}@host'], site.environment, {'app.py': APP})
    for worker in site.workers:
        worker.ready()
    publisher = Celery('publisher', set_as_current=False, broker=site.environment['BROKER_URL'])
    publisher.conf.update(broker_transport_options=PATIENT_BROKER)
    try:
        publisher.conf.task_routes = {'reload': {'queue': 'everybody', 'exchange': 'everybody'}}
        for name in ('first', 'second'):
            publisher.send_task('reload', (str(site.journal), name))
        publisher.conf.task_routes = {}
        publisher.amqp.flush_routes()
        publisher.send_task('reload', (str(site.journal), 'third'), exchange='everybody', routing_key='any')
        names = [f'{worker}@host {name}' for worker in ('one', 'two') for name in ('first', 'second', 'third')]
        wait_for(lambda: sorted(site.journalled()) == names, 'both workers to run all three tasks')
    finally:
        publisher.pool.force_close_all()
        publisher.close()
