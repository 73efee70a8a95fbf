"""Other arguments for a waiting task: its message is decoded, changed and encoded again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from celery.utils.saferepr import saferepr
from kombu.exceptions import EncodeError
from kombu.serialization import dumps, registry

from kombu_couchdb.couchdb.client import Document
from kombu_couchdb.documents.body import attached, encoded, is_large
from kombu_couchdb.documents.types import Message
from kombu_couchdb.documents.workitem import task_name
from kombu_couchdb.errors import ConfigurationError, NotChangeable

#: The maximum length of the arguments in the headers, in characters, as Celery cuts them.
_MAX_REPR = 1024


def with_arguments(
    app: Any, doc: Document, body: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> Document:
    """Return an item with other arguments; None keeps what its decoded `body` has.

    *Raises* `NotChangeable`; `ConfigurationError` if `args` or `kwargs` are of a wrong type.
    """
    if not isinstance(body, (list, tuple)) or len(body) != 3:
        raise NotChangeable("the job cannot be edited: its message is not a task of Celery's protocol 2")
    if args is not None and (isinstance(args, (str, bytes)) or not isinstance(args, Sequence)):
        raise ConfigurationError(f'args must be a list, not {args!r:.80}')
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ConfigurationError(f'kwargs must be a dictionary, not {kwargs!r:.80}')
    args = list(body[0] if args is None else args)
    kwargs = dict(body[1] if kwargs is None else kwargs)
    _check(app.tasks.get(task_name(doc)), args, kwargs)
    message = doc['message']
    serializer = registry.type_to_name.get(message.get('content-type'))
    if serializer is None:
        raise NotChangeable(f'the job cannot be edited: this app has no serializer for {message.get("content-type")}')
    try:
        content_type, encoding, payload = dumps([args, kwargs, body[2]], serializer)
    except (EncodeError, TypeError, ValueError) as exc:
        raise NotChangeable(f'the arguments cannot be encoded as {message.get("content-type")}: {exc}') from exc
    stored, body_encoding = encoded(payload, encoding)
    headers = {name: value for name, value in message['headers'].items() if name != 'compression'}
    changed: Message = {
        **message,
        'body': stored,
        'content-type': content_type,
        'content-encoding': encoding,
        'properties': {**message['properties'], 'body_encoding': body_encoding},
        'headers': {**headers, 'argsrepr': saferepr(args, _MAX_REPR), 'kwargsrepr': saferepr(kwargs, _MAX_REPR)},
    }
    edited = {name: value for name, value in doc.items() if name != '_attachments'}
    if is_large(changed) and 'key' not in doc:
        changed, edited['_attachments'] = attached(changed)
    return {**edited, 'message': changed}


def _check(task: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Check arguments as Celery does when a task is sent; only if this app knows the task."""
    if task is None or not task.typing or not hasattr(task, '__header__'):
        return
    try:
        task.__header__(*args, **kwargs)
    except TypeError as exc:
        raise NotChangeable(f'the task {task.name} does not take these arguments: {exc}') from exc
