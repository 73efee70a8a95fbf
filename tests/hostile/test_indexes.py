"""What the client says and does while CouchDB builds the index of a view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_couchdb.cli import clients
from kombu_couchdb import design
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.http import Connections
from kombu_couchdb.errors import IndexNotReady, ServerUnavailable
from kombu_couchdb.queues import waiting
from kombu_couchdb.transport.channel import Declared

from .fake import HOST, Fake

TOO_SLOW: tuple[int, dict[str, str], dict[str, str]] = (
    500,
    {},
    {'error': 'timeout', 'reason': 'The request could not be processed in a reasonable amount of time.'},
)


def fake(monkeypatch: pytest.MonkeyPatch, pending: list[int], *, running: bool = True) -> Callable[..., Client]:
    """Return the class of clients for a server that builds an index: it lacks so many changes, one after the other."""

    def respond(path: str, right: Any) -> Any:
        if path.endswith('/_info'):
            left = pending.pop(0) if len(pending) > 1 else pending[0]
            return {'view_index': {'updater_running': running, 'updates_pending': {'total': left}}}
        return TOO_SLOW if pending[0] and '/_view/' in path and not is_lazy else right

    is_lazy = False
    server = Fake(respond)
    send = server.send_call

    def note_lazy(call: Any, request: Any, **settings: Any) -> Any:
        nonlocal is_lazy
        is_lazy = 'update=lazy' in request.url
        return send(call, request, **settings)

    monkeypatch.setattr(server, 'send_call', note_lazy)
    monkeypatch.setattr(Connections, '_connected', server.connected_to())
    return lambda kind=Client: kind(Address(host=HOST, database='db', user='me', password='unguessable-77'))


@pytest.mark.parametrize(
    'read',
    [
        lambda client: client.view(design.NAME, 'dead', reduce=False),
        lambda client: waiting.count(client, [design.rows_of('q')]),
    ],
    ids=['a view', 'queries of a view'],
)
def test_error_says_that_an_index_is_built_and_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, read: Callable[[Client], Any]
) -> None:
    with pytest.raises(IndexNotReady, match=r'CouchDB builds the index celery-v8, and 113,335 changes remain$'):
        read(fake(monkeypatch, [113_335])())


@pytest.mark.parametrize(('pending', 'running'), [(0, True), (113_335, False)])
def test_error_is_that_of_the_server_if_no_index_is_built(
    monkeypatch: pytest.MonkeyPatch, pending: int, running: bool
) -> None:
    client = fake(monkeypatch, [pending], running=running)()
    if pending:
        with pytest.raises(ServerUnavailable, match='reasonable amount of time'):
            client.view(design.NAME, 'dead', reduce=False)
    else:
        assert client.view(design.NAME, 'dead', reduce=False)


def test_commands_report_the_index_and_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(clients, '_PAUSE_SECONDS', 0.0)
    client = fake(monkeypatch, [260_000, 150_000, 20_000, 0])(clients._PatientClient)
    assert client.view(design.NAME, 'dead', reduce=False)
    assert client.view(design.NAME, 'dead', reduce=False)
    assert capsys.readouterr().err == 'CouchDB builds the index celery-v8: 260,000 changes remain\n'


def test_commands_give_up_an_index_that_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, '_PAUSE_SECONDS', 0.0)
    monkeypatch.setattr(clients, '_STUCK_SECONDS', 0.0)
    client = fake(monkeypatch, [260_000, 150_000, 150_000])(clients._PatientClient)
    with pytest.raises(IndexNotReady, match='CouchDB makes no progress with the index celery-v8'):
        client.view(design.NAME, 'dead', reduce=False)


def test_declaration_of_a_queue_can_be_unpacked_while_the_index_is_built() -> None:
    """kombu unpacks it for the queue of remote control, and would connect again after an error."""

    def count() -> int:
        raise IndexNotReady('not yet')

    declared = Declared('q', count)
    assert tuple(declared) == ('q', 0, 0)
    with pytest.raises(IndexNotReady):
        assert declared.message_count
