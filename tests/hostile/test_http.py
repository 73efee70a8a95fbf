"""Arbitrary bytes from a server: each becomes a response or a CouchDBError, and a consumer survives them."""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import re
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import strategies as st
from kombu import Connection

from kombu_couchdb import outage
from kombu_couchdb.couchdb import auth, bounds, pacing
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.call import HTTPOptions
from kombu_couchdb.couchdb.changes import Longpoll, open_feed
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import RETRIED, AnswerTooLarge, BrokenAnswer, CouchDBError, NotCouchDB, ServerUnavailable
from tests.chaos.proxy import Answer, Proxy
from tests.conftest import PATIENCE
from tests.patience import PatientConnection
from tests.support import Inbox, publish, run_python

from .strategies import found
from .test_messages import clear

DOC = b'{"_id":"x","_rev":"1-a"}'
SECRET = 'tell-nobody-77'


class Wire(socketserver.ThreadingTCPServer):
    """A server that records the head of a request, sends `answer`, at once or in pieces, and closes the connection."""

    daemon_threads, allow_reuse_address, request_queue_size = True, True, 100

    def __init__(self) -> None:
        super().__init__(('127.0.0.1', 0), _Handler)
        self.answer: bytes | Callable[[], Iterable[bytes]] = b''
        self.heads: list[bytes] = []


class _Handler(socketserver.StreamRequestHandler):
    server: Wire

    def handle(self) -> None:
        head = b''.join(takewhile(lambda line: line not in (b'\r\n', b''), iter(self.rfile.readline, None)))
        self.server.heads.append(head)
        try:
            for piece in [self.server.answer] if isinstance(self.server.answer, bytes) else self.server.answer():
                self.wfile.write(piece)
        except OSError:
            pass  # the client has closed the connection


@pytest.fixture
def wires() -> Iterator[Callable[[], Wire]]:
    """A function that starts a server."""
    running: list[Wire] = []

    def start() -> Wire:
        running.append(Wire())
        threading.Thread(target=running[-1].serve_forever, args=(0.01,), daemon=True).start()
        return running[-1]

    yield start
    for wire in running:
        wire.shutdown()
        wire.server_close()


def ask(wire: Wire, call: Callable[[Client], Any] = lambda client: client.get('x'), limit: float = PATIENCE) -> Any:
    """Read a document, and return the document or the error."""
    client = Client(
        Address(host='127.0.0.1', port=wire.server_address[1], user='me', password=SECRET), HTTPOptions(limit, limit)
    )
    try:
        return call(client)
    except CouchDBError as exc:
        clear(exc, SECRET)
        return exc
    finally:
        client.close()


def head(status: int, *lines: str) -> bytes:
    return '\r\n'.join([f'HTTP/1.1 {status} Reason', *lines, '', '']).encode('latin-1')


@pytest.mark.parametrize('body', [DOC, b'', b'<html>', b'null'], ids=['document', 'empty', 'page', 'null'])
def test_every_status_code(wires: Callable[[], Wire], body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, '_MAX_WAIT_SECONDS', 0.1)
    wire = wires()
    for status in [*range(101, 600, 7), 200, 201, 202, 204, 400, 401, 404, 409, 412, 413, 429, 500, 503, 0, 1000]:
        wire.answer = head(status, f'Content-Length: {len(body)}') + body
        answer = ask(wire)
        if 500 <= status < 600 or status == 429:
            assert isinstance(answer, RETRIED)
        assert isinstance(answer, CouchDBError) or (200 <= status < 300 and body == DOC), (status, answer)


HEADERS = [
    *('Content-Length: 5', 'Content-Length: 500', 'Content-Length: -1', 'Content-Length: x'),
    *('Content-Length: 1, 2', 'Content-Length: ' + '9' * 30, 'Transfer-Encoding: chunked'),
    *('Transfer-Encoding: nonsense', 'Content-Encoding: gzip', 'Content-Encoding: deflate'),
    *('Content-Encoding: br, gzip', 'Content-Type: text/html'),
    *('Content-Type: application/json; charset=utf-16', 'Date: yesterday'),
    *('Date: Mon, 99 Foo 99999 99:99:99 GMT', 'Date: Thu, 01 Jan 0001 00:00:00 GMT'),
    *('Set-Cookie: \xff=; Expires=never; =;;', 'Set-Cookie: a=b', 'Location: http://127.0.0.1:1/'),
    *('Connection: close', 'Connection: \x00', 'X' * 70_000 + ': x', 'no colon', ': no name', ' folded'),
    *['X-Many: x'] * 2,
]
BODIES = [
    DOC,
    b'',
    b'{',
    DOC[:-3],
    DOC * 2,
    gzip.compress(DOC),
    gzip.compress(DOC)[:-9],
    b'18\r\n' + DOC + b'\r\n0\r\n\r\n',
    b'18\r\n' + DOC,
    b'ffffffffffff\r\n' + DOC,
    b'-5\r\n' + DOC,
    b'zz\r\n' + DOC + b'\r\n',
    b'\xff\xfe' + DOC,
    DOC.decode().encode('utf-16'),
    b'\xef\xbb\xbf' + DOC,
    b'[' * 100_000,
    b'{"_id":"x","_rev":"1-a","n":' + b'9' * 5000 + b'}',
    b'NaN',
    b'{"_id":"x","_rev":"1-a","n":1e999}',
]


def test_inconsistent_headers_and_bodies(wires: Callable[[], Wire]) -> None:
    wire = wires()
    statuses, headers = st.sampled_from([200, 200, 200, 404, 500, 302, 100, 204]), st.sampled_from(HEADERS)
    answers = []
    right: tuple[int, list[str], bytes] = (200, [], DOC)  # at least one valid response
    for status, lines, body in [
        right,
        *found(st.tuples(statuses, st.lists(headers, max_size=3), st.sampled_from(BODIES))),
    ]:
        wire.answer = head(status, *lines) + body
        answers.append(ask(wire))
    assert all(isinstance(one, CouchDBError) or (one['_id'], one['_rev']) == ('x', '1-a') for one in answers)
    assert any(isinstance(one, dict) for one in answers)


def test_bytes_that_are_not_http(wires: Callable[[], Wire]) -> None:
    wire = wires()
    for sent in found(st.binary(max_size=200) | st.binary(max_size=50).map(b'HTTP/1.1 200 '.__add__)):
        wire.answer = sent
        assert isinstance(ask(wire), CouchDBError)


@pytest.mark.parametrize(
    'answer',
    [
        b'\x15\x03\x01\x00\x02\x02F',
        b'\x15\x03\x03\x00\x02\x02\n',
        head(400) + b'Client sent an HTTP request to an HTTPS server.\n',
        head(400) + b'<html><title>400 The plain HTTP request was sent to HTTPS port</title>',
        head(400) + b"Reason: You're speaking plain HTTP to an SSL-enabled server port.",
        b'',
    ],
    ids=['alert', 'Erlang', 'Go', 'nginx', 'Apache', 'hangs up'],
)
def test_plain_http_to_a_tls_server(wires: Callable[[], Wire], answer: bytes) -> None:
    wire = wires()
    wire.answer = answer
    assert re.search(
        'the server speaks TLS at this port[;,] write couchdbs:// for couchdb:// in the URL', str(ask(wire))
    )


#: The seconds between two pieces of a response, and the seconds until its end. The complete response would be valid.
PAUSE, LONG = 0.05, 10.0


def dripped(*parts: bytes | int) -> Callable[[], Iterator[bytes]]:
    """Return the pieces of a response. A number in `parts` stands for that many spaces, sent one by one."""

    def pieces() -> Iterator[bytes]:
        for part in parts:
            if isinstance(part, bytes):
                yield part
                continue
            for _ in range(part):
                time.sleep(PAUSE)
                yield b' '

    return pieces


MANY = int(LONG / PAUSE)
CONTINUE = b'HTTP/1.1 100 Continue\r\n\r\n'


def continued() -> Iterator[bytes]:
    for _ in range(MANY):
        time.sleep(PAUSE)
        yield CONTINUE
    yield head(200, f'Content-Length: {len(DOC)}') + DOC


DRIPS: dict[str, Callable[[], Iterator[bytes]]] = {
    'head': dripped(b'HTTP/1.1 200 OK\r\nX-Long: ', MANY, f'x\r\nContent-Length: {len(DOC)}\r\n\r\n'.encode() + DOC),
    'continue': continued,
    'body': dripped(head(200, f'Content-Length: {len(DOC) + MANY}') + DOC, MANY),
    'body to the end': dripped(head(200) + DOC, MANY),
    'chunk': dripped(
        head(200, 'Transfer-Encoding: chunked') + f'{len(DOC) + MANY:x}\r\n'.encode() + DOC, MANY, b'\r\n0\r\n\r\n'
    ),
    'line of a chunk': dripped(
        head(200, 'Transfer-Encoding: chunked') + b'18;', MANY, b'\r\n' + DOC + b'\r\n0\r\n\r\n'
    ),
    'error': dripped(head(404, f'Content-Length: {len(DOC) + MANY}') + DOC, MANY),
}


@pytest.mark.parametrize('what', DRIPS)
def test_slow_response_is_given_up(wires: Callable[[], Wire], what: str) -> None:
    """The time limit is for the whole response: with a limit for each byte, a server could block a thread for ever."""
    wire = wires()
    wire.answer = DRIPS[what]
    answer = ask(wire, limit=0.3)
    assert type(answer) is ServerUnavailable
    assert 'no response within the time limit (transport option request_timeout)' in str(answer)
    assert len(wire.heads) == 1, 'a request that was too slow must not be repeated'


@pytest.mark.parametrize('what', ['head', 'continue', 'error'])
def test_time_limit_of_a_longpoll_covers_headers_and_errors(wires: Callable[[], Wire], what: str) -> None:
    wire = wires()
    wire.answer = DRIPS[what]
    answer = ask(wire, lambda client: open_feed(client, 0, {}, 10, -0.85).content)  # a time limit of 0.3 s
    assert type(answer) is ServerUnavailable


@pytest.mark.parametrize('pool', ['gevent', 'eventlet'])
def test_slow_response_is_given_up_in_greenlets(wires: Callable[[], Wire], pool: str) -> None:
    if importlib.util.find_spec(pool) is None:
        pytest.skip(f'{pool} is not installed')
    wire, drips = wires(), iter([DRIPS['continue'], DRIPS['chunk']])
    wire.answer = lambda: next(drips)()
    done = run_python(f"""
{'from gevent import monkey; monkey.patch_all()' if pool == 'gevent' else 'import eventlet; eventlet.monkey_patch()'}
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.call import HTTPOptions
from kombu_couchdb.couchdb.client import Client
for _ in range(2):
    try:
        print(Client(Address(host='127.0.0.1', port={wire.server_address[1]}), HTTPOptions(0.3)).get('x'))
    except Exception as exc:
        print(exc)
""")
    assert done.stdout.count('no response within the time limit') == 2


def endless(first: bytes, piece: bytes) -> Callable[[], Iterator[bytes]]:
    return lambda: itertools.chain([first], itertools.repeat(piece))


CHUNKED = head(200, 'Transfer-Encoding: chunked')
FLOODS = {
    'body': endless(head(200), b' ' * 1000),
    'chunks': endless(CHUNKED, b'3e8\r\n' + b' ' * 1000 + b'\r\n'),
    'line of a chunk': endless(CHUNKED, b'0' * 1000),
    'continue': endless(b'', CONTINUE),
    'error': endless(head(503), b' ' * 1000),
}


@pytest.mark.parametrize('what', FLOODS)
@pytest.mark.parametrize(
    'call', [lambda client: client.get('x'), lambda client: Longpoll(client).wait(0, 0, {})], ids=['get', 'longpoll']
)
def test_endless_response_is_given_up(
    wires: Callable[[], Wire], monkeypatch: pytest.MonkeyPatch, what: str, call: Callable[[Client], Any]
) -> None:
    monkeypatch.setattr(bounds, 'MAX_RESPONSE_BYTES', 1_000_000)
    wire = wires()
    wire.answer = FLOODS[what]
    answer = ask(wire, call)
    assert isinstance(answer, ServerUnavailable)
    if what != 'line of a chunk':  # urllib3 has its own limit for this
        assert type(answer) is AnswerTooLarge
        assert 'the response has more bytes than are read at once' in str(answer)


@pytest.mark.parametrize(
    'call', [lambda client: client.get('x'), lambda client: Longpoll(client).wait(0, 0, {})], ids=['get', 'longpoll']
)
def test_compressed_response_is_not_decompressed(wires: Callable[[], Wire], call: Callable[[Client], Any]) -> None:
    """389 kB of compressed data can become 1 GB."""
    wire = wires()
    text = gzip.compress(DOC)
    for status, coding in ((200, 'gzip'), (200, 'GZIP'), (200, 'zstd'), (500, 'deflate'), (500, 'x, gzip')):
        wire.answer = head(status, f'Content-Length: {len(text)}', f'Content-Encoding: {coding}') + text
        answer = ask(wire, call)
        assert type(answer) is BrokenAnswer
        assert 'the response is compressed' in str(answer)
    assert b'Accept-Encoding: identity\r\n' in wire.heads[0]


def test_redirects_are_not_followed(wires: Callable[[], Wire]) -> None:
    wire, other = wires(), wires()
    for status in (301, 302, 303, 307, 308):
        wire.answer = head(status, f'Location: http://127.0.0.1:{other.server_address[1]}/', 'Content-Length: 0')
        assert isinstance(ask(wire), NotCouchDB)
    assert other.heads == []
    assert b'Authorization' in wire.heads[0]


LOCKED = b'{"error":"forbidden","reason":"Account is temporarily locked due to multiple authentication failures"}'


def test_user_locked_by_one_node_uses_the_next(wires: Callable[[], Wire]) -> None:
    """Each node counts wrong passwords separately."""
    one, other = wires(), wires()
    one.answer = head(403, f'Content-Length: {len(LOCKED)}') + LOCKED
    other.answer = head(200, f'Content-Length: {len(DOC)}') + DOC
    first, second = (
        Address(host='127.0.0.1', port=wire.server_address[1], user='me', password=SECRET) for wire in (one, other)
    )
    client = Client(replace(first, others=(second,)), HTTPOptions(PATIENCE, PATIENCE))
    with pytest.raises(ServerUnavailable, match="has locked user 'me'"):
        client.get('x')
    assert client.get('x')['_id'] == 'x'
    client.close()


#: Temporary responses of a server or of a proxy in front of it: status and body.
TROUBLE = [
    *((500, b'{"error":"unknown_error","reason":"function_clause"}'), (502, b'<html>Bad Gateway</html>'), (503, b'')),
    *((429, b'slow down'), (200, b'<html>We are down for maintenance</html>'), (200, b''), (200, b'{}'), (200, b'[]')),
    *((200, b'null'), (200, b'{"rows":[{}]}'), (200, b'{"results":[{"id":5}],"last_seq":1}')),
    *((200, b'{"rows": [{"id"'), (302, b''), (404, b'{"error":"not_found"}'), (400, b''), (403, LOCKED)),
    *((409, b'{"error":"conflict"}'), (413, b''), (201, b'[{"ok":true,"id":"another","rev":"1-a"}]')),
    *((200, b'"text"'), (101, b'')),
]


def test_consumer_survives_wrong_responses(
    connect: Callable[..., Connection], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, 'LONGEST_PAUSE_SECONDS', 0.05)
    monkeypatch.setattr(auth, '_LOCKED_SECONDS', 0.05)
    monkeypatch.setattr(pacing, '_PAUSE_SECONDS', 0.05)
    publisher = connect()
    publisher.connect()
    address = client.address
    with Proxy(address.host, address.port) as proxy:
        url = str(publisher.as_uri(include_password=True)).replace(f':{address.port}/', f':{proxy.port}/')
        worker = PatientConnection(url, transport_options={'visibility_timeout': 3.0})
        inbox = Inbox(worker)
        publish(publisher, 0)
        inbox.wait(1)
        for number, (status, body) in enumerate(TROUBLE, 1):
            before = proxy.accepted
            proxy.lie(Answer(status, body), every=2)
            publish(publisher, number)
            inbox.drain_until(lambda before=before: proxy.accepted >= before + 3, 'wrong responses')  # type: ignore[misc]
        proxy.be_honest()
        publish(publisher, 'last')
        wanted = {*range(len(TROUBLE) + 1), 'last'}
        inbox.drain_until(lambda: set(inbox.bodies) == wanted, 'all messages')
        worker.release()
