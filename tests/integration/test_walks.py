"""The modules that a message and a result pass, as `docs/explanation/architecture.rst` draws them.

A module is passed if one of its functions has the message, its id or an object that contains it as an argument.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from kombu import Connection

from kombu_couchdb.couchdb.client import Client
from tests.conftest import wait_for
from tests.support import ROOT, Inbox, items, publish

PAGE = (ROOT / 'docs/explanation/architecture.rst').read_text('utf-8')
PACKAGES = ('kombu_couchdb', 'celery_couchdb')
OF_THE_IO_THREAD = ('kombu_couchdb.consumer.', 'kombu_couchdb.leases.')


class Walk:
    """Records, in every thread, the modules whose functions get `key` in an argument."""

    def __init__(self) -> None:
        self.modules: list[str] = []
        self._key: str | None = None
        self._busy = threading.local()

    def profile(self, frame: FrameType, event: str, arg: object) -> None:
        module = str(frame.f_globals.get('__name__', ''))
        key = self._key
        if event != 'call' or key is None or not module.startswith(PACKAGES) or getattr(self._busy, 'now', False):
            return
        self._busy.now = True
        try:
            code = frame.f_code
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if module not in self.modules and any(contains(frame.f_locals.get(name), key) for name in names[:8]):
                self.modules.append(module)
        finally:
            self._busy.now = False

    def of(self, key: str, action: Callable[[], object]) -> set[str]:
        """Return the modules that `key` passes while an action runs; the folder `couchdb` counts as one."""
        self.modules, self._key = [], key
        sys.setprofile(self.profile)
        try:
            action()
        finally:
            sys.setprofile(None)
            self._key = None
        return {re.sub(r'^kombu_couchdb\.couchdb\..*', 'kombu_couchdb.couchdb', module) for module in self.modules}


def contains(value: object, key: str, depth: int = 0) -> bool:
    """Tell whether a value contains a text, also in the objects of ours that carry messages."""
    if isinstance(value, str):
        return key in value
    if isinstance(value, bytes):
        return key.encode() in value
    if depth > 4:
        return False
    if isinstance(value, dict):
        return any(contains(one, key, depth + 1) for pair in list(value.items()) for one in pair)
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(contains(one, key, depth + 1) for one in list(value))
    if type(value).__module__.startswith(PACKAGES) and type(value).__name__ in (
        'Delivery',
        'Candidate',
        'Message',
        'Handed',
    ):
        return any(contains(one, key, depth + 1) for one in list(vars(value).values()))
    return False


def drawn(title: str) -> set[str]:
    """Return the modules of a walk in the page."""
    found = re.search(rf'^\*\*{title}\*\* passes ([^*]*?)\.\n', PAGE, re.MULTILINE)
    assert found, f'{title} is missing on the page'
    return set(re.findall(r'``([\w.]+)``', found[1]))


@pytest.fixture
def walk() -> Iterator[Walk]:
    walk = Walk()
    threading.setprofile(walk.profile)  # for the threads that start from now on
    yield walk
    threading.setprofile(None)


def test_message(walk: Walk, connect: Callable[..., Connection], client: Client) -> None:
    publisher = connect()
    publish(publisher, 'first')
    published = walk.of('a-body', lambda: publish(publisher, 'a-body-1'))
    assert published - drawn('A published message') == set()
    assert {'kombu_couchdb.transport.publisher', 'kombu_couchdb.queues.store'} <= published
    inbox = Inbox(connect(), ack=False, prefetch=2)
    inbox.wait(2)
    publish(publisher, 'a-body-2')  # it is not claimed before the walk begins: the prefetch count is used up
    [item] = [each for each in items(client) if not each['claimed']]

    def claim() -> None:
        for message in inbox.messages:
            message.ack()
        inbox.messages.clear()
        inbox.wait(1)

    claimed = walk.of(item['_id'], claim)

    def ack() -> None:
        inbox.messages.pop().ack()
        wait_for(lambda: not items(client), 'the message to be deleted')

    acknowledged = walk.of(item['_id'], ack)
    for title, modules in (('A claimed message', claimed), ('An acknowledged message', acknowledged)):
        # At the same time the I/O thread may do other work with all the messages that it holds, such as a sweep.
        others = {name for name in modules - drawn(title) if not name.startswith(OF_THE_IO_THREAD)}
        assert others == set(), title
    assert {'kombu_couchdb.documents.workitem', 'kombu_couchdb.transport.qos'} <= claimed & acknowledged
    assert 'kombu_couchdb.consumer.claims' in claimed
    assert 'kombu_couchdb.consumer.commits' in acknowledged


def test_result(walk: Walk, url: str) -> None:
    apps = [Celery('walk', set_as_current=False, broker='memory://', backend=url) for _ in range(2)]
    backend: Any = apps[0].backend
    backend.store_result('before', 1, 'SUCCESS')
    backend.open_outbox(serve_children=False)

    def store() -> None:
        backend.store_result('a-task-1', 1, 'SUCCESS', request=Context(id='a-task-1'))
        backend.outbox.pipeline.wait()

    found = {'A stored result': walk.of('a-task', store)}
    backend.outbox.close()
    result = apps[1].AsyncResult('a-task-2')
    storing = threading.Timer(0.5, lambda: backend.store_result('a-task-2', 2, 'SUCCESS'))
    threading.setprofile(None)
    storing.start()
    threading.setprofile(walk.profile)
    found['A result that a program waits for'] = walk.of('a-task-2', lambda: result.get(timeout=60))
    storing.join()
    assert {title: modules - drawn(title) for title, modules in found.items()} == {title: set[str]() for title in found}
    assert {'celery_couchdb.backend', 'celery_couchdb.results.store'} <= found['A stored result']
    assert 'celery_couchdb.waiting.subscriber' in found['A result that a program waits for']
