"""Shared helpers of the tests: a recording consumer, a consumer in another process, and a log of requests."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from urllib.parse import unquote

import pytest
from celery import Celery
from click.testing import CliRunner, Result
from kombu import Connection, Consumer, Queue
from kombu.message import Message

from celery_couchdb.cli import couchdb
from kombu_couchdb.couchdb.call import Call
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.server import Server
from kombu_couchdb.documents.ids import PAUSE

from .conftest import PATIENCE, wait_for

T = TypeVar('T')

ROOT = Path(__file__).resolve().parent.parent


def publish(connection: Connection, body: Any, to: str = 'q', **properties: Any) -> None:
    """Publish one message to the queue of this name."""
    connection.Producer().publish(body, routing_key=to, **{'serializer': 'json', **properties})


def publish_many(connection: Connection, bodies: Iterable[Any], to: str = 'q', **properties: Any) -> None:
    """Publish messages to a queue, in one batch if this version of kombu has batches."""
    with connection.Producer() as producer, producer.batch() if hasattr(producer, 'batch') else nullcontext():
        for body in bodies:
            producer.publish(body, routing_key=to, **{'serializer': 'json', **properties})


def eta(seconds: float) -> dict[str, str]:
    """Return the headers of a task that is due in `seconds` seconds."""
    return {'task': 't', 'id': 'x', 'eta': datetime.fromtimestamp(time.time() + seconds, timezone.utc).isoformat()}


def due(message: Message) -> float:
    """Return the due date of a message, from its headers, as a timestamp."""
    return datetime.fromisoformat(message.headers['eta']).timestamp()


def store_all(client: Client, values: dict[str, Any]) -> None:
    """Store the successes of many tasks in one request."""
    docs = []
    for task_id, value in values.items():
        result = {'status': 'SUCCESS', 'result': value, 'traceback': None, 'children': [], 'task_id': task_id}
        docs.append({'_id': f'celery-task-meta-{task_id}', 'type': 'Result', 'status': 'SUCCESS', 'value': result})
    client.bulk(docs)


def items(client: Client) -> list[dict[str, Any]]:
    """Return all WorkItems of a database, oldest first."""
    rows = client.request('GET', '/_all_docs', {'include_docs': True})['rows']
    return [row['doc'] for row in rows if row['doc'].get('type') == 'WorkItem']


def leave_leaf(client: Client, doc_id: str, rev: str, **fields: Any) -> None:
    """Write a leaf revision as a partitioned node of a cluster would: existing leaves stay, and may now conflict."""
    client.request('POST', '/_bulk_docs', body={'new_edits': False, 'docs': [{**fields, '_id': doc_id, '_rev': rev}]})


class Inbox:
    """A consumer on a channel of its own that records the messages it receives, and when."""

    def __init__(
        self, connection: Connection, *queues: str | Queue, ack: bool = True, prefetch: int = 0, no_ack: bool = False
    ) -> None:
        self.connection = connection
        self.messages: list[Message] = []
        self.times: list[float] = []
        self._ack = ack and not no_ack
        self.channel = connection.channel()
        if prefetch:
            self.channel.basic_qos(0, prefetch, False)
        self.consumer = Consumer(
            self.channel,
            [Queue(q) if isinstance(q, str) else q for q in queues or ('q',)],
            no_ack=no_ack,
            on_message=self._on_message,
            accept=['json', 'pickle', 'msgpack', 'text/plain', 'application/data'],
        )
        self.consumer.consume()

    def _on_message(self, message: Message) -> None:
        self.messages.append(message)
        self.times.append(time.time())
        if self._ack:
            message.ack()

    @property
    def bodies(self) -> list[Any]:
        """The decoded bodies of the messages received so far."""
        return [message.decode() for message in self.messages]

    def drain(self, seconds: float) -> Inbox:
        """Handle the next event, if one arrives within `seconds`, and return this inbox."""
        try:
            self.connection.drain_events(timeout=seconds)
        except TimeoutError:
            pass
        return self

    def drain_until(self, condition: Callable[[], T], what: str = '') -> T:
        """Receive messages until `condition()` is true, and return its value; fail the test if that takes too long."""

        def drained() -> T:
            self.drain(0.1)
            return condition()

        return wait_for(drained, what)

    def wait(self, count: int, timeout: float = PATIENCE) -> list[Any]:
        """Receive until there are `count` messages, and return their bodies; fail the test after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while len(self.messages) < count:
            if time.monotonic() > deadline:
                pytest.fail(f'received only {len(self.messages)} of {count} messages within {timeout:g} s')
            self.drain(0.5)
        return self.bodies

    def stays(self, count: int, seconds: float) -> None:
        """Receive for `seconds` more seconds, and fail the test unless there are exactly `count` messages then."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.drain(left)
        assert len(self.messages) == count, self.bodies


@dataclass
class Request:
    """One HTTP request that a `Client` sent."""

    method: str
    path: str
    body: Any
    at: float

    @property
    def docs(self) -> list[dict[str, Any]]:
        """The documents that the request writes."""
        if not isinstance(self.body, dict) or self.method == 'GET' or self.path == '/_bulk_get':
            return []
        return self.body.get('docs', [self.body] if 'type' in self.body else [])

    @property
    def is_heartbeat(self) -> bool:
        """Whether the request writes only heartbeats."""
        return bool(self.docs) and all(doc.get('type') == 'Consumer' for doc in self.docs)


def replace_in_clients(monkeypatch: pytest.MonkeyPatch, database: str, name: str, method: Callable[..., Any]) -> None:
    """Replace a method in all clients of one database, including clients created later.

    Clients of other databases keep the original, so that a thread that outlived an earlier test does not call the
    replacement.
    """
    original = getattr(Client, name)

    def chosen(self: Client, *args: Any, **kwargs: Any) -> Any:
        return (method if self.address.database == database else original)(self, *args, **kwargs)

    monkeypatch.setattr(Client, name, chosen)


def record_requests(monkeypatch: pytest.MonkeyPatch, database: str, *, pauses: bool = False) -> list[Request]:
    """Return a list to which every further request to a database is appended.

    A program reads the pause of a queue at most once a second: how often depends on speed. So these reads are in the
    list only with `pauses`.
    """
    log: list[Request] = []
    send = Server.send

    def recorded(self: Server, call: Call, connections: Any) -> Any:
        is_pause = call.method == 'GET' and unquote(call.path).startswith(f'/{PAUSE}')
        if unquote(connections[self.current].url).endswith(f'/{database}') and (pauses or not is_pause):
            body = None if call.body is None else json.loads(call.body)
            log.append(Request(call.method, call.path, body, time.monotonic()))
        return send(self, call, connections)

    monkeypatch.setattr(Server, 'send', recorded)
    return log


class Peer:
    """A consumer in another process (`tests/peer.py`); a context manager that ends the process."""

    def __init__(
        self,
        url: str,
        *,
        ack: bool = False,
        skew: float = 0.0,
        queue_name: str = 'q',
        options: dict[str, Any] | None = None,
        fanout: str | None = None,
        auto_delete: bool = False,
    ) -> None:
        given = {
            'url': url,
            'ack': ack,
            'skew': skew,
            'queue': queue_name,
            'options': options or {},
            'fanout': fanout,
            'auto_delete': auto_delete,
        }
        self.process = subprocess.Popen(
            [sys.executable, '-m', 'tests.peer'],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._readers = [threading.Thread(target=target, daemon=True) for target in (self._read_events, self._read_log)]
        for reader in self._readers:
            reader.start()
        self.tell(given)
        assert self.next() == {'ready': True}

    def _read_events(self) -> None:
        for line in self.process.stdout or ():
            self._events.put(json.loads(line))

    def _read_log(self) -> None:
        for line in self.process.stderr or ():
            self.log.append(line)

    def tell(self, command: Any) -> None:
        """Send a command to the process."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + '\n')
        self.process.stdin.flush()

    def next(self) -> dict[str, Any]:
        """Return the next event that the process reports."""
        try:
            return self._events.get(timeout=PATIENCE)
        except queue.Empty:
            pytest.fail(f'the other process reported nothing; its log:\n{"".join(self.log)}')

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        os.kill(self.process.pid, number)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.send_signal(signal.SIGCONT)
        self.process.wait()
        for reader in self._readers:
            reader.join(PATIENCE)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]


def run_python(code: str, *, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter; if `check`, fail the test unless the code succeeds."""
    done = subprocess.run(
        [sys.executable, '-c', code],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, **environment},
    )
    if check and done.returncode:
        pytest.fail(f'the code failed:\n{done.stdout}{done.stderr}')
    return done


def end(app: Celery) -> None:
    """Close all connections of an app, including those that consume replies."""
    app.pool.force_close_all()
    if client := getattr(app.backend, 'client', None):  # one of results that are stored
        client.close()
    app.close()


def release_all(connections: Iterable[Connection]) -> None:
    """Release connections, the last opened first."""
    for connection in reversed(list(connections)):
        connection.release()


def command_of(app: Celery, **environment: str) -> Callable[..., Result]:
    """Return a function that runs a command like `celery -A app couchdb` in this process."""

    def run(*given: str, answer: str = '') -> Result:
        # Tables are as wide as they need: pytest-xdist may have set a width.
        return CliRunner(env={'COLUMNS': None, **environment}).invoke(
            couchdb, given, answer, obj=SimpleNamespace(app=app, no_color=True)
        )

    return run
