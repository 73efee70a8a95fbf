"""Remote control of some workers of an app, by the CouchDB user of a client: shut down, pools, and queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents.validation import check_names
from kombu_couchdb.errors import ConfigurationError

from .connections import client_of, control_as

#: How long workers have to reply, in seconds. Those that can, need a tenth of a second.
REPLY_SECONDS = 2.0

#: The most processes by which a pool grows or shrinks at once, and the maximum length of a reply, in characters.
_MAX_PROCESSES, _MAX_CHARACTERS = 100, 300


class Reply(NamedTuple):
    """What a worker replied."""

    text: str
    is_error: bool = False


class RemoteControl:
    """Remote control of the workers with the given node names, such as `w1@host`.

    *Every* method returns the replies by node name. A worker is missing there if it has not replied in time: it has
    stopped, remote control is switched off (`worker_enable_remote_control`), or its `solo` pool runs a task. Then it
    does what it was told after that task. *Every* method raises the errors of `kombu_couchdb.errors`.
    """

    def __init__(self, app: Any, client: Client | None = None) -> None:
        """Use `client`, or create one for the database of the app's broker. Its user sends the commands.

        *Raises* `ConfigurationError` if the app's broker is not CouchDB.
        """
        self._app, self._client = app, client or client_of(app)

    def shut_down(self, names: Sequence[str]) -> dict[str, Reply]:
        """Let workers end when the tasks that they run have ended; a ping tells who is there, for nobody replies."""
        found = self._call(names, 'ping')
        with control_as(self._app, self._client) as mailbox:
            mailbox.cast(list(names), 'shutdown')
        return dict.fromkeys(found, Reply('shuts down when its tasks have ended'))

    def resize(self, names: Sequence[str], processes: int) -> dict[str, Reply]:
        """Add processes to the pools of workers, or, with a negative number, remove them."""
        if not 0 < abs(processes) <= _MAX_PROCESSES:
            raise ConfigurationError(f'pools grow and shrink by 1 to {_MAX_PROCESSES} processes, not by {processes}')
        found = self._call(names, 'pool_grow' if processes > 0 else 'pool_shrink', n=abs(processes))
        fixed = Reply('the pool has a fixed size', is_error=True)  # threads, solo: Celery replies with AttributeError
        return {name: fixed if 'has no attribute' in reply.text else reply for name, reply in found.items()}

    def add_consumer(self, names: Sequence[str], queue: str) -> dict[str, Reply]:
        """Let workers consume a queue, too, until they end."""
        found = self._call(names, 'add_consumer', queue=_valid(queue))
        added = Reply(f'consumes {queue} now')  # Celery replies: add consumer reports
        return {name: added if reply.text == f'add consumer {queue}' else reply for name, reply in found.items()}

    def cancel_consumer(self, names: Sequence[str], queue: str) -> dict[str, Reply]:
        """Let workers consume a queue no more, until they end."""
        return self._call(names, 'cancel_consumer', queue=_valid(queue))

    def _call(self, names: Sequence[str], command: str, **arguments: Any) -> dict[str, Reply]:
        with control_as(self._app, self._client) as mailbox:
            answers = mailbox.call(list(names), command, arguments, timeout=REPLY_SECONDS)
        found = [(name, reply) for answer in answers if isinstance(answer, dict) for name, reply in answer.items()]
        return {name: _reply(reply) for name, reply in found if name in names}


def _valid(queue: str) -> str:
    check_names(queue=queue)
    if not queue:
        raise ConfigurationError('the name of the queue is empty')
    return queue


def _reply(reply: Any) -> Reply:
    """Return a reply; any program that may publish can send one."""
    given = reply if isinstance(reply, dict) else {}
    return Reply(str(given.get('ok', given.get('error', reply)))[:_MAX_CHARACTERS], 'ok' not in given)
