"""Tests of the proxy that simulates a broken network."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chaos.proxy import Answer, Proxy
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import NotFound, ServerUnavailable


@pytest.fixture
def through(client: Client, proxy: Proxy) -> Client:
    """A client whose requests go through the proxy."""
    return Client(replace(client.address, host='127.0.0.1', port=proxy.port))


@pytest.mark.parametrize('answer', [Answer(503), Answer(429), Answer(500), Answer(200, b'{"rows":[{"id')])
def test_proxy_responds_instead_of_the_server(proxy: Proxy, through: Client, client: Client, answer: Answer) -> None:
    proxy.lie(answer)
    with pytest.raises(ServerUnavailable):
        through.put({'_id': 'x', 'text': 'x' * 200_000})
    with pytest.raises(NotFound):
        client.get('x')
    proxy.be_honest()
    through.put({'_id': 'x'})
    assert client.get('x')['_id'] == 'x'


def test_proxy_hides_the_response_to_a_request_that_was_carried_out(
    proxy: Proxy, through: Client, client: Client
) -> None:
    proxy.lie(Answer(500, asked=True))
    with pytest.raises(ServerUnavailable, match='500'):
        through.put({'_id': 'x'})
    assert client.get('x')['_id'] == 'x'
