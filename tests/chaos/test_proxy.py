"""Tests of the proxy that simulates a broken network."""

from __future__ import annotations

import time
from dataclasses import replace
from email.utils import parsedate_to_datetime

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


def test_proxy_replaces_every_second_response(proxy: Proxy, through: Client) -> None:
    proxy.lie(Answer(503), every=2)
    outcomes = []
    for number in range(6):
        try:
            through.put({'_id': str(number)})
            outcomes.append(True)
        except ServerUnavailable:
            outcomes.append(False)
    assert outcomes == [True, False] * 3


@pytest.mark.parametrize('ahead', [-300.0, 3600.0])
def test_proxy_sets_the_server_clock_wrong_and_right_again(proxy: Proxy, through: Client, ahead: float) -> None:
    def told() -> float:
        return parsedate_to_datetime(through.http.send('GET', None).headers['Date']).timestamp() - time.time()

    before = told()
    proxy.ahead = ahead
    assert abs(told() - before - ahead) < 60
    assert through.put({'_id': 'x'})
    proxy.ahead = 0.0
    assert abs(told() - before) < 60


def test_proxy_limits_the_rate_and_loses_no_data(proxy: Proxy, through: Client, client: Client) -> None:
    client.put({'_id': 'x', 'text': 'x' * 100_000})
    proxy.rate = 100_000.0
    began = time.monotonic()
    through.put({'_id': 'y', 'text': through.get('x')['text']})
    assert time.monotonic() - began > 1.9
    assert len(client.get('y')['text']) == 100_000
