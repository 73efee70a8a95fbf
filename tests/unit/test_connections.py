"""Connections of an app as another CouchDB user: their address is exactly that of the client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from celery import Celery

from celery_couchdb.connections import backend_as, control_as, producer_as
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.client import Client

USER: dict[str, Any] = {'user': 'ann@shop', 'password': 'a/b:c@d e%;f'}
NODE = Address('couch1', 5984, 'shop', **USER)
ADDRESSES = {
    'plain': NODE,
    'IPv6': replace(NODE, host='::1'),
    'session': replace(NODE, auth='cookie'),
    'nodes': replace(NODE, others=(replace(NODE, host='couch2'), replace(NODE, host='couch3'))),
    'TLS': replace(NODE, tls=True, port=6984),
    'own certificates': replace(NODE, tls=True, verify='/ca.pem', cert=('/cert.pem', '/key.pem')),
    'one certificate': replace(NODE, tls=True, verify=False, cert='/both.pem'),
}


@pytest.fixture
def app() -> Celery:
    app = Celery('other', set_as_current=False, broker='couchdbs://app:secret@couch1/app', backend='couchdb://couch1/r')
    app.conf.update(broker_user='app', broker_password='secret', broker_use_ssl={'ca_certs': '/app.pem'})
    return app


@pytest.mark.parametrize('address', ADDRESSES.values(), ids=ADDRESSES)
def test_connection_has_the_address_of_the_client(app: Celery, address: Address) -> None:
    client = Client(address)
    with producer_as(app, client) as producer:
        assert producer.connection.transport.address == address
    with control_as(app, client) as mailbox:
        assert (mailbox.connection.transport.address, mailbox.producer_pool) == (address, None)
    assert backend_as(app, client).client.address == address


def test_credentials_of_the_app_are_not_used(app: Celery) -> None:
    app.conf.update(broker_url='couchdb://couch1/app', broker_user=None, broker_password=None)
    app.conf.broker_transport_options = {'credentials': 'environment'}
    with producer_as(app, Client(NODE)) as producer:
        assert producer.connection.transport.address == NODE


def test_user_of_the_app_shares_its_connections(app: Celery) -> None:
    with app.connection_for_write() as connection:
        own = Client(connection.transport.address)
    with producer_as(app, own) as first:
        pass
    with producer_as(app, None) as second:
        assert second is first
    assert backend_as(app, None) is backend_as(app, app.backend.client) is app.backend
