"""Tasks that fail for good: their messages are kept, with their errors.

Celery calls `Request.on_failure` in the main process of a worker when a task has failed, and there acknowledges the
message of a task that is acknowledged late. It could tell the transport that the task has failed. This module does:
the message then becomes a dead letter in the write that would have deleted it. The message of a task that was
acknowledged early is kept afterwards, in a write of its own. `patches.workers` has the class of requests.

A task has not failed for good if its message is delivered again or it is retried, if it raises `Ignore`, or if it was
revoked. A task that rejects its message late needs nothing: the transport makes a dead letter of that message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from celery.exceptions import Ignore, Reject, Retry, Terminated, WorkerLostError
from celery.utils.serialization import get_pickled_exception

#: How a request ends. A task that rejects its message, or whose process is lost, may be delivered again (`rejected`);
#: one that raises `Ignore` or is replaced by another task is `ignored`.
OUTCOMES = ('succeeded', 'failed', 'retried', 'rejected', 'revoked', 'ignored')


def outcome_of(exc: BaseException) -> str:
    """Return how a request ends whose task has raised an exception: one of `OUTCOMES`."""
    exc = _plain(exc)
    for kind, outcome in ((Ignore, 'ignored'), (Reject, 'rejected'), (Retry, 'retried'), (Terminated, 'revoked')):
        if isinstance(exc, kind):
            return outcome
    return 'failed'


@contextmanager
def keeping(request: Any, outcome: str, exc: BaseException, traceback: Any) -> Iterator[None]:
    """Keep the message of a task that has ended with an exception if it has failed; the block is Celery's method.

    The block acknowledges the message, or the message was acknowledged before.
    """
    was_acknowledged, exc = request.acknowledged, _plain(exc)
    is_final = outcome == 'failed' or (isinstance(exc, Reject) and not exc.requeue and was_acknowledged)
    is_revoked = request._already_cancelled or request._already_revoked
    if is_final and not is_revoked and not request.couchdb_is_kept:
        request.couchdb_failure = _error(request, exc, traceback)
    try:
        yield
    finally:
        if was_acknowledged and request.couchdb_failure:
            _fail(request, acknowledged=True)
        request.couchdb_failure = None


def note(request: Any) -> None:
    """Tell the transport, before a message is acknowledged or rejected, that its task has failed."""
    if request.couchdb_failure and not request.acknowledged:
        _fail(request, acknowledged=False)


def unless(request: Any, method: Callable[..., Any], *args: Any) -> Any:
    """Call a method that tells whether a task whose process was lost has succeeded or is retried; return its answer."""
    failure, request.couchdb_failure = request.couchdb_failure, None
    if not (answer := method(*args)):
        request.couchdb_failure = failure
    return answer


def _fail(request: Any, *, acknowledged: bool) -> None:
    fail = getattr(request.message, 'fail', None)  # only messages of our transport
    if fail is not None:
        request.couchdb_is_kept = True
        fail(request.couchdb_failure, acknowledged=acknowledged)


def _plain(exc: BaseException) -> BaseException:
    found: Any = get_pickled_exception(exc.exc if isinstance(exc, ExceptionWithTraceback) else exc)
    return found if isinstance(found, BaseException) else exc


def _error(request: Any, exc: BaseException, traceback: Any) -> dict[str, Any]:
    """Return an exception as `kombu_couchdb.documents.types.TaskError`."""
    if isinstance(exc, (SystemExit, KeyboardInterrupt)):
        exc = WorkerLostError(f'the process of the task ended: {exc!r}')
    try:
        text = str(exc)
    except Exception:  # the text of an exception of the application may fail
        text = ''
    return {
        'type': type(exc).__qualname__,
        'text': text,
        'traceback': str(traceback or ''),
        'worker': request.hostname,
        'retries': request.request_dict.get('retries') or 0,
    }
