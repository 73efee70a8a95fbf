"""Messages with headers, content and bodies of any type: Celery's worker never raises for one that is accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.exceptions import InvalidTaskError
from celery.worker import state
from celery.worker.strategy import default
from hypothesis import given
from hypothesis import strategies as st
from kombu.exceptions import ContentDisallowed, DecodeError

from celery_couchdb.parcels.parcel_checks import Accept, ParcelRefused, checked, message_of
from kombu_couchdb.consumer.credit import Credit
from kombu_couchdb.consumer.delivery import Delivery
from kombu_couchdb.documents import task_message, validation, workitem
from kombu_couchdb.documents.body import decoded
from kombu_couchdb.transport.qos import Message

from .strategies import json_values, retyped

ACCEPT = Accept(['add'], {'celery'})

EMBEDDED: dict[str, Any] = dict.fromkeys(('callbacks', 'errbacks', 'chain', 'chord'))

#: A message as Celery writes it.
FULL: dict[str, Any] = {
    'body': json.dumps([[1, 2], {}, EMBEDDED]),
    'content-type': 'application/json',
    'content-encoding': 'utf-8',
    'headers': Celery(set_as_current=False).amqp.as_task_v2('a', 'add', (1, 2)).headers,
    'properties': {'body_encoding': 'utf-8', 'priority': 0, 'correlation_id': 'a', 'delivery_info': {'exchange': ''}},
}

#: Its headers, and others that a worker, this transport or the parcels know.
NAMES = sorted({*FULL['headers'], *task_message.HEADERS, *dir(Context), 'x-parcel', 'rate_key', 'job_key'})

SIGNATURE: dict[str, Any] = {
    'task': 'add',
    'args': [1],
    'kwargs': {},
    'options': dict.fromkeys((*task_message.OPTIONS, 'chain', 'chord', 'link', 'link_error')),
    'subtask_type': None,
    'immutable': False,
}


#: Values of which most are wrong for each header.
ODD: list[Any] = [
    *(None, True, False, 0, 5, -5, 1e300, 10**30, '', 'x', '5', '\n\x1b[2J', '9999-12-31T23:59:59', '0001-01-01'),
    *('9999-12-31T23:59:59+00:00', '0001-01-01T00:00:00+23:59', [], [1], ['x'], ['x', 'y'], [[1]], [None, None]),
    *([-1, 5], [5, True], [1, 2, 3], {}, {'x': 'y'}, {'__type__': 'uuid', '__value__': 5}),
    *({'__type__': name, '__value__': '9999-12-31'} for name in ('datetime', 'date', 'time', 'bytes', 'decimal')),
]


def with_header(name: str, value: Any) -> dict[str, Any]:
    return {**FULL, 'headers': {**FULL['headers'], name: value}}


#: Messages with any value in one header.
ONE_HEADER = st.builds(with_header, st.sampled_from(NAMES), json_values(exact=False))


def stored(message: dict[str, Any]) -> dict[str, Any]:
    return {**workitem.new('id', 'celery', FULL, 1.0), '_rev': '1-a', 'message': message}


def add(x: int, y: int) -> int:
    return x + y


class Worker:
    """What Celery's worker does in its main process with a message, up to the pool."""

    def __init__(self, zone: str) -> None:
        self.app = Celery('worker', set_as_current=False, broker='memory://')
        self.app.conf.timezone = zone
        task = self.app.task(name='add', shared=False)(add)
        self.app.finalize()
        consumer = SimpleNamespace(
            hostname='worker',
            connection_errors=(),
            event_dispatcher=None,
            timer=SimpleNamespace(call_at=lambda when, *_, **__: when + 1),
            apply_eta_task=None,
            disable_rate_limits=True,
            task_buckets={},
            on_task_request=lambda request: request.execute_using_pool(self),
            _limit_task=None,
            _limit_post_eta=None,
            pool=self,
            controller=SimpleNamespace(state=SimpleNamespace(revoked=())),
            qos=SimpleNamespace(increment_eventually=lambda: None),
        )
        self._handle = default(task, self.app, consumer)

    def apply_async(self, *_: Any, soft_timeout: Any, timeout: Any, args: Any, **__: Any) -> Any:
        """Do what the pool does with a task."""
        for seconds in (soft_timeout, timeout):
            assert seconds is None or seconds + 1.0 > 0
        Context(args[2])

    def receive(self, doc: dict[str, Any]) -> None:
        """Receive a message as a worker that watches for stamps."""
        channel = SimpleNamespace(decode_body=decoded, qos=SimpleNamespace(note_malformed=lambda *_: None))
        try:
            message = Message(Delivery(doc, Credit()).payload(), channel)
        except ValueError:
            return  # the channel makes it a dead letter
        message.accept = {'application/json'}
        state.revoked.clear()  # what expires is revoked
        with suppress(InvalidTaskError, ContentDisallowed, DecodeError):  # Celery rejects the message with a reason
            self._handle(message, None, lambda *_: None, lambda *_: None, [str, lambda request: request.stamps])


@pytest.fixture(scope='module', params=['UTC', 'Pacific/Kiritimati', 'Pacific/Pago_Pago'])
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    yield Worker(request.param)
    state.reset_state()  # the requests of a process, which later tests count


@pytest.mark.parametrize('name', [*NAMES, 'content-type', 'content-encoding'])
def test_worker_accepts_each_header_without_a_flaw(worker: Worker, name: str) -> None:
    for value in ODD:
        doc = stored(with_header(name, value) if name in NAMES else {**FULL, name: value})
        if validation.flaw(doc) is None:
            worker.receive(doc)


@given(ONE_HEADER)
def test_worker_accepts_each_message_without_a_flaw(worker: Worker, message: dict[str, Any]) -> None:
    doc = json.loads(json.dumps(stored(message)))
    if validation.flaw(doc) is None:
        worker.receive(doc)


@given(ONE_HEADER)
def test_headers_of_a_moved_parcel_do_not_act(message: dict[str, Any]) -> None:
    try:
        moved = checked({'message': message}, None, ACCEPT, ['json'])['headers']
    except ParcelRefused:
        return
    usual, found = Context({'task': 'add', 'id': 'a'}), Context(moved)
    acting = {*dir(Context)} - {*task_message.HEADERS}
    assert {name: getattr(found, name) for name in acting if name in vars(found)} == {
        name: getattr(usual, name) for name in acting if name in vars(found)
    }
    shown = [value for name, value in moved.items() if name in task_message.HEADERS and isinstance(value, str)]
    assert all(value.isprintable() for value in shown if value not in (moved['argsrepr'], moved['kwargsrepr']))


@given(
    retyped({'body': [[1, 2], {}, {**EMBEDDED, 'callbacks': [SIGNATURE], 'chain': [SIGNATURE], 'chord': SIGNATURE}]})
)
def test_body_of_any_shape(doc: dict[str, Any]) -> None:
    body = doc.get('body')
    if task_message.body_flaw(body) is None:
        assert body is not None
        reason = ACCEPT.refusal('add', body[2])
        assert reason is None or isinstance(reason, str)


@given(retyped({'message': FULL}))
def test_parcels_of_any_shape_are_moved_or_refused(doc: dict[str, Any]) -> None:
    with suppress(ParcelRefused):
        checked(doc, None, ACCEPT, ['json'])
    with suppress(ParcelRefused):
        message_of(doc, None)
