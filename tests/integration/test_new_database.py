"""Copies of a database, as docs/howto/new-database.rst makes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from celery import Celery

from celery_couchdb.jobs import Jobs
from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.unique import collect_outcomes
from tests.conftest import PATIENCE, PATIENT_BROKER
from tests.support import ROOT, Inbox, end, items

from .conftest import Connect, kill_all

PAGE = (ROOT / 'docs' / 'howto' / 'new-database.rst').read_text('utf-8')


@pytest.fixture
def new(server: Server) -> Iterator[Celery]:
    """An app with a database that is set up, and empty."""
    if server.process is not None:
        pytest.skip('the embedded server does not replicate')
    with server.fresh_database() as name:
        app = Celery('new', set_as_current=False, broker=server.couchdb_url(name), backend=server.couchdb_url(name))
        app.conf.broker_transport_options = PATIENT_BROKER
        app.connection_for_write().ensure_connection(max_retries=1)
        yield app
        end(app)


@pytest.mark.parametrize('selector', re.findall(r'"selector": (\{.*?\}\})', PAGE))
def test_messages_are_copied(
    app: Celery, new: Celery, client: Client, connect: Connect, server: Server, selector: str
) -> None:
    """Jobs that wait, unique ones and dead ones are in the new database; deleted ones are left behind."""
    job: dict[str, Any] = {'headers': {'job_key': 'k'}, 'countdown': 3600}
    done, dead = app.send_task('other', queue='done'), app.send_task('other', queue='dead')
    Inbox(connect(), 'done').drain_until(lambda: len(items(client)) == 1, 'a message to be deleted')
    kill_all(Inbox(connect(), 'dead', ack=False), client, 1)
    unique, ready, later = (app.send_task('other', **options) for options in (job, {}, {'countdown': 3600}))
    fresh = Jobs(new)
    source, target = (f'{server.url}/{each.address.database}' for each in (client, fresh.client))
    body = {'source': source, 'target': target, 'selector': json.loads(selector)}
    assert requests.post(f'{server.url}/_replicate', json=body, timeout=PATIENCE).json()['ok']
    states = [fresh.state(each.id) for each in (done, dead, unique, ready, later)]
    assert states == ['gone', 'dead', 'scheduled', 'ready', 'scheduled']
    assert fresh.client.info()['doc_del_count'] == 0
    with collect_outcomes() as outcomes:
        new.send_task('other', **job)
    assert [outcome.what for outcome in outcomes] == ['moved']
