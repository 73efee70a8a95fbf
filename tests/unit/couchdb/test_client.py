"""The client of one database (`kombu_couchdb.couchdb.client`), against a server with prepared responses."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from kombu_couchdb import errors
from kombu_couchdb.couchdb import http, pacing, server
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.call import HTTPOptions, time_limit, urgent
from kombu_couchdb.couchdb.changes import open_feed
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.fork_safety import Shared
from kombu_couchdb.couchdb.write_result import WriteResult, WriteStatus
from tests.conftest import PATIENCE

#: A stored document.
DOC = {'_id': 'x', '_rev': '1-a'}

#: In place of a response: the server closes the connection.
CUT = None


@dataclass
class Request:
    method: str
    url: str
    headers: Any
    text: bytes
    connection: int

    @property
    def path(self) -> str:
        return urlsplit(self.url).path


def respond(body: Any = None, status: int = 200, **headers: str) -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f'HTTP/1.1 {status} Reason',
        f'Content-Length: {len(text)}',
        *(f'{name.replace("_", "-")}: {value}' for name, value in headers.items()),
    ]
    return '\r\n'.join([*lines, '', '']).encode() + text


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    server: Peer

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline()
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        text = self.rfile.read(int(self.headers.get('Content-Length', 0)))
        self.server.seen.append(Request(self.command, self.path, self.headers, text, self.client_address[1]))
        response = self.server.responses.pop(0) if self.server.responses else respond(DOC)
        if callable(response):
            response = response()
        if response is not CUT:
            self.wfile.write(response)
            self.wfile.flush()
        self.close_connection = response is CUT


class Peer(ThreadingHTTPServer):
    """A server that returns the `responses` in turn and records the requests in `seen`."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(('127.0.0.1', 0), Handler)
        self.responses: list[bytes | Callable[[], bytes] | None] = []
        self.seen: list[Request] = []


@pytest.fixture(scope='module')
def running() -> Iterator[Peer]:
    with Peer() as peer:
        threading.Thread(target=peer.serve_forever, args=(0.005,), daemon=True).start()
        yield peer
        peer.shutdown()


@pytest.fixture
def peer(running: Peer, monkeypatch: pytest.MonkeyPatch) -> Peer:
    for name in ('no_proxy', 'NO_PROXY'):
        monkeypatch.setenv(name, '*')
    running.responses, running.seen = [], []
    monkeypatch.setattr(server, '_servers', Shared({}))  # tests do not share clocks and sessions
    return running


@pytest.fixture
def client(peer: Peer) -> Iterator[Client]:
    client = Client(
        Address(host='127.0.0.1', port=peer.server_port, database='a/b', user='jürgen', password='p:ß@ /'),
        HTTPOptions(PATIENCE, PATIENCE),
    )
    yield client
    client.close()


# -- requests


#: Python 3.13 decodes 5,000 levels.
DEEP = 100_000


@pytest.mark.parametrize('deep', ['[' * DEEP + ']' * DEEP, '{"a":' * DEEP + '1' + '}' * DEEP], ids=['lists', 'objects'])
def test_what_is_nested_too_deeply_for_python_is_left_out(peer: Peer, client: Client, deep: str) -> None:
    text = '{"_id": "x", "_rev": "1-a", "text": "]\\"[", "deep": [' + deep + ', 1], "last": [2]}'
    peer.responses = [respond(text.encode())]
    doc = client.get('x')
    assert (doc['text'], doc['deep'][1], doc['last']) == (']"[', 1, [2])
    inner = doc['deep'][0]
    while not isinstance(inner, str):
        [inner] = inner.values() if isinstance(inner, dict) else inner
    assert inner == http.TOO_DEEP


def test_the_winner_of_a_conflicted_document_is_fetched(peer: Peer, client: Client) -> None:
    one, other = {'_id': 'b', '_rev': '2-a'}, {'_id': 'b', '_rev': '2-b'}
    plain = {'_id': 'a', '_rev': '1-a'}
    peer.responses = [
        respond({'results': [{'id': 'a', 'docs': [{'ok': plain}]}, {'id': 'b', 'docs': [{'ok': one}, {'ok': other}]}]}),
        respond({'rows': [{'id': 'b', 'key': 'b', 'doc': other}]}),
    ]
    assert client.fetch(['a', 'b']) == [plain, other]


@pytest.mark.parametrize(
    'results',
    [
        [{'id': 'x', 'docs': [{'error': {'id': 'x', 'error': 'internal_fabric_error', 'reason': 'nodedown'}}]}],
        [],
        [{'id': 'y', 'docs': []}],
    ],
    ids=['error', 'no results', 'another document'],
)
def test_a_server_error_does_not_mean_that_a_document_is_missing(peer: Peer, client: Client, results: Any) -> None:
    peer.responses = [respond({'results': results})]
    with pytest.raises(errors.ServerUnavailable):
        client.fetch(['x'])


# -- connections


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs fork')
@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
@pytest.mark.parametrize('closes', [False, True])
def test_a_forked_child_opens_its_own_connections(peer: Peer, client: Client, closes: bool) -> None:
    peer.responses = [respond({**DOC, 'to': whom}) for whom in ('parent', 'child', 'parent again')]
    assert client.get('x')['to'] == 'parent'
    child = os.fork()
    if not child:
        try:
            if closes:
                client.close()  # not the parent's
            os._exit(0 if client.get('x')['to'] == 'child' else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.get('x')['to'] == 'parent again'
    parent, other, again = (request.connection for request in peer.seen)
    assert parent == again != other


# -- repeated requests


@pytest.mark.parametrize(
    'read',
    [lambda client: client.get('x'), lambda client: client.fetch(['x']), lambda client: client.sequence()],
    ids=['get', 'fetch', 'sequence'],
)
def test_a_read_is_repeated_once(peer: Peer, client: Client, read: Callable[[Client], Any]) -> None:
    peer.responses = [CUT, respond({**DOC, 'results': [{'id': 'x', 'docs': [{}]}], 'update_seq': 1})]
    read(client)
    first, second = peer.seen
    assert (first.method, first.url, first.text) == (second.method, second.url, second.text)
    peer.responses = [CUT, CUT]
    with pytest.raises(errors.ServerUnavailable):
        read(client)
    assert len(peer.seen) == 4


@pytest.mark.parametrize(
    'write',
    [
        lambda client: client.put({'_id': 'x'}),
        lambda client: client.bulk([{'_id': 'x'}]),
        lambda client: client.request('PUT', ''),
        lambda client: client.delete(),
        lambda client: open_feed(client, 0, {}, 10, 4.0),
    ],
    ids=['put', 'bulk', 'create', 'delete', 'open_feed'],
)
def test_a_write_is_never_repeated(peer: Peer, client: Client, write: Callable[[Client], Any]) -> None:
    peer.responses = [CUT, respond({'rev': '1-a'})]
    with pytest.raises(errors.ServerUnavailable):
        write(client)
    assert len(peer.seen) == 1


# -- responses


@pytest.mark.parametrize(
    ('text', 'kind', 'said'),
    [
        *((text, errors.ServerUnavailable, 'cut off') for text in (b'{"_id": "x"', b'  {"rows": [', b'{"a": "\xff"}')),
        *((text, errors.NotCouchDB, 'responds with status 200, without JSON') for text in (b'<html>', b'', b'\x89PNG')),
    ],
)
def test_response_without_complete_json(
    peer: Peer, client: Client, text: bytes, kind: type[Exception], said: str
) -> None:
    peer.responses = [respond(text)]
    with pytest.raises(kind, match=said):
        client.get('x')


@pytest.mark.parametrize(
    ('status', 'retry_after', 'seconds'),
    [
        (503, '60', 60),
        (503, '{in_60_s}', 60),
        (503, '3600', 100),
        (503, 'inf', 100),
        (503, 'soon', 0),
        (503, '-5', 0),
        (503, 'nan', 0),
        (500, '60', 0),
    ],
)
def test_retry_after_delays_the_next_request(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, status: int, retry_after: str, seconds: float
) -> None:
    """Once, and no longer than the time limit: a header of one hour once delayed each request within that hour."""
    client = Client(Address(host='127.0.0.1', port=peer.server_port, database='db'), HTTPOptions(request_timeout=100.0))
    slept: list[float] = []
    # Not time.sleep itself, which other threads use as well.
    clocks = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + sum(slept), sleep=slept.append)
    monkeypatch.setattr(server, 'time', clocks)
    date = format_datetime(datetime.fromtimestamp(time.time() + 60, timezone.utc), usegmt=True)
    peer.responses = [respond({'error': 'busy'}, status, Retry_After=retry_after.format(in_60_s=date))]
    with pytest.raises(errors.ServerUnavailable):
        client.get('x')
    assert slept == []
    for _ in range(3):
        client.get('x')
    assert seconds / 2 <= sum(slept) <= seconds
    client.close()


@pytest.mark.parametrize('retry_after', ['nan', '0', 'soon', '1'])
def test_a_response_on_its_way_does_not_end_the_pause(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, retry_after: str
) -> None:
    """Another thread of the process has been told to pause for longer meanwhile."""
    client = Client(Address(host='127.0.0.1', port=peer.server_port, database='db'), HTTPOptions(request_timeout=100.0))
    slept: list[float] = []
    clocks = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + sum(slept), sleep=slept.append)
    monkeypatch.setattr(server, 'time', clocks)

    def respond_last() -> bytes:
        peer.responses = [respond({'error': 'busy'}, 503, Retry_After='60')]
        with pytest.raises(errors.ServerUnavailable):
            client.get('y')
        return respond({'error': 'busy'}, 503, Retry_After=retry_after)

    peer.responses = [respond_last]
    with pytest.raises(errors.ServerUnavailable):
        client.get('x')
    assert slept == []
    client.get('x')
    assert 30 <= sum(slept) <= 60
    client.close()


def test_with_tls_a_proxy_sees_only_the_host(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ('no_proxy', 'NO_PROXY'):
        monkeypatch.delenv(name)
    monkeypatch.setenv('HTTPS_PROXY', f'http://127.0.0.1:{peer.server_port}')
    peer.responses = [respond({}, 403)] * 2
    with pytest.raises(errors.ServerUnavailable):
        Client(Address(host='db.example', port=6984, tls=True, user='me', password='p')).get('x')
    for request in peer.seen:
        assert (request.method, request.url) == ('CONNECT', 'db.example:6984')
        assert not {'authorization', 'cookie'} & {name.lower() for name in request.headers}


def test_a_silent_proxy_is_not_taken_for_a_server_without_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ('no_proxy', 'NO_PROXY'):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(('127.0.0.1', 0)) as proxy:
        monkeypatch.setenv('HTTPS_PROXY', f'http://127.0.0.1:{proxy.getsockname()[1]}')
        with pytest.raises(errors.ServerUnavailable) as caught:
            Client(Address(host='db.example', port=6984, tls=True), HTTPOptions(0.3, 0.3)).get('x')
    assert 'TLS' not in str(caught.value)


def test_netrc_is_ignored(peer: Peer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / 'netrc').write_text('default login me password p\n')
    monkeypatch.setenv('NETRC', str(tmp_path / 'netrc'))
    Client(Address(host='127.0.0.1', port=peer.server_port)).get('x')
    assert 'Authorization' not in peer.seen[0].headers


@pytest.mark.parametrize('status', [201, 202, 500])
def test_each_document_of_a_bulk_write_has_a_result(peer: Peer, client: Client, status: int) -> None:
    elements = [
        {'ok': True, 'id': 'a', 'rev': '1-a', 'accepted': True},
        {'id': 'b', 'error': 'conflict', 'reason': 'x'},
    ]
    peer.responses = [respond(elements, status)]  # the status is 500 if nodes of the cluster are down
    assert client.bulk([{'_id': 'a'}, {'_id': 'b'}]) == [
        WriteResult('a', WriteStatus.UNPROVEN, '1-a'),
        WriteResult('b', WriteStatus.CONFLICT, error='conflict', reason='x'),
    ]


def test_the_server_is_asked_for_its_time_before_the_first_use(peer: Peer, client: Client) -> None:
    peer.responses = [respond(DOC, Date='Thu, 01 Jan 2099 00:00:00 GMT')]
    assert datetime.fromtimestamp(client.clock.now(), timezone.utc).year == 2099
    assert [(request.method, request.path) for request in peer.seen] == [('HEAD', '/')]
    client.clock.now()
    assert len(peer.seen) == 1


# -- limits of the service


@pytest.fixture
def paced(client: Client, monkeypatch: pytest.MonkeyPatch) -> Client:
    """A client with short pauses after refusals."""
    for name, number in {
        '_PAUSE_SECONDS': 0.01,
        '_JITTER_SECONDS': 0.0,
        '_WINDOW_SECONDS': 0.01,
        '_MIN_RATE': 100.0,
    }.items():
        monkeypatch.setattr(pacing, name, number)
    return client


REFUSAL = respond({'error': 'too_many_requests', 'reason': 'rate limit'}, 429)


def test_refused_request_is_sent_again_by_the_same_call(peer: Peer, paced: Client) -> None:
    peer.responses = [REFUSAL, REFUSAL, respond(DOC)]
    assert paced.get('x')['_id'] == 'x'
    assert len(peer.seen) == 3


def test_refused_request_waits_no_longer_than_the_time_limit_of_a_response(peer: Peer, paced: Client) -> None:
    paced.options = HTTPOptions(2.0, 2.0)
    peer.responses = [respond({'error': 'too_many_requests'}, 429, Retry_After='3600'), respond(DOC)]
    with time_limit(60):
        assert paced.get('x')['_id'] == 'x'


@pytest.mark.parametrize('retry_after', ['nan', '-inf', '0', 'soon'])
def test_refusal_that_names_no_pause_is_followed_by_one(
    peer: Peer, paced: Client, monkeypatch: pytest.MonkeyPatch, retry_after: str
) -> None:
    monkeypatch.setattr(pacing, '_PAUSE_SECONDS', 60.0)
    peer.responses = [respond({'error': 'too_many_requests'}, 429, Retry_After=retry_after)]
    with time_limit(0.2), pytest.raises(errors.ServerUnavailable, match='429'):
        paced.get('x')
    assert len(peer.seen) == 1


def test_time_limit_of_the_caller_ends_the_wait(peer: Peer, paced: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, '_PAUSE_SECONDS', 60.0)
    peer.responses = [REFUSAL, respond(DOC)]
    with time_limit(0.2), pytest.raises(errors.ServerUnavailable, match='429') as caught:
        paced.get('x')
    assert caught.value.status == 429
    with time_limit(0.2), pytest.raises(errors.ServerUnavailable, match='time limit of the caller'):
        paced.get('x')


def test_urgent_request_waits_for_a_limited_time(peer: Peer, paced: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, '_PAUSE_SECONDS', 60.0)
    peer.responses = [REFUSAL]
    with urgent(0.1), pytest.raises(errors.ServerUnavailable, match='429'):
        paced.get('x')


def test_other_kinds_do_not_wait(peer: Peer, paced: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, '_PAUSE_SECONDS', 600.0)
    paced.server.pace = pacing.Pace(paced.address.server)
    paced.server.pace.refused(pacing.Turn(pacing.RequestKind.WRITE), 0.0)
    peer.responses = [respond(DOC)]
    assert paced.get('x')


def test_bulk_write_is_cut(peer: Peer, paced: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, '_MIN_RATE', 40.0)  # ten in a request
    monkeypatch.setattr(pacing, '_START_GROWTH', 1.0)
    docs = [{'_id': f'doc-{number}'} for number in range(35)]
    stored = [{'ok': True, 'id': doc['_id'], 'rev': '1-a'} for doc in docs]
    peer.responses = [REFUSAL, *(respond(stored[start : start + 10], 201) for start in range(0, 35, 10))]
    assert [result.id for result in paced.bulk(docs)] == [doc['_id'] for doc in docs]
    assert [len(json.loads(request.text)['docs']) for request in peer.seen] == [35, 10, 10, 10, 5]
