"""Storage of message bodies: in the document, as text or base64; large ones as attachments.

The body of a unique job always stays in the document, whatever its size (see `workitem.new`).

A document whose body is an attachment is read and written without its body: readers get a *stub*, and write the stub
back. So claims, releases and dead letters cost the same for a message of 20 kB and for one of 20 MB.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from ..errors import Unstorable
from .types import Attachment, Document, Message

__all__ = ['attached', 'decoded', 'encoded', 'is_large', 'stub']

#: The name and type of the attachment, which contains the bytes of the body. CouchDB would compress an attachment of a
#: text type.
NAME, _TYPE = 'body', 'application/octet-stream'

#: The maximum length of a body in the document, in characters as stored; longer ones are attached. (Measured on CouchDB
#: 3.5: see docs/production/performance.rst.)
MAX_INLINE = 16_000


def encoded(body: Any, encoding: str | None = None) -> tuple[Any, str | None]:
    """Return a body as it is stored, and its `body_encoding`; `encoding` is the message's `content-encoding`."""
    if isinstance(body, bytes) and str(encoding).lower() in ('utf-8', 'utf8', 'us-ascii', 'ascii'):
        try:
            return body.decode('utf-8'), 'utf-8'
        except UnicodeDecodeError:
            pass  # the message declares a text encoding, but the body is not text
    if isinstance(body, bytes):
        return base64.b64encode(body).decode('ascii'), 'base64'
    return body, 'utf-8'


def decoded(body: Any, body_encoding: str | None = None) -> Any:
    """Return a body as it was published, from a document's member (text) or an attachment (bytes).

    *Raises* `ValueError` if the stored body or its `body_encoding` is malformed.
    """
    if body_encoding not in ('base64', 'utf-8', None):
        raise ValueError(f'unknown body_encoding {body_encoding!r}')
    if isinstance(body, bytes):
        return body if body_encoding == 'base64' else body.decode('utf-8')
    return base64.b64decode(body, validate=True) if body_encoding == 'base64' else body


def is_large(message: Mapping[str, Any]) -> bool:
    """Tell whether the body of a message is large enough to be attached."""
    body = message.get('body')
    return isinstance(body, str) and len(body) > MAX_INLINE


def attached(message: Message) -> tuple[Message, dict[str, Attachment]]:
    """Return the message without its body, and the `_attachments` of its document, which contain the body.

    *Raises* `Unstorable` if the body contains half of a surrogate pair.
    """
    body, properties = message['body'] or '', message.get('properties') or {}
    if properties.get('body_encoding') != 'base64':
        try:
            body = base64.b64encode(body.encode('utf-8')).decode('ascii')
        except UnicodeEncodeError as exc:
            raise Unstorable('the body contains half of a surrogate pair, which is not valid text') from exc
    return {**message, 'body': None}, {NAME: {'content_type': _TYPE, 'data': body}}


def stub(doc: Mapping[str, Any]) -> Document | None:
    """Return the stub of the attachment that contains the body of a document; None if the body is in the document."""
    message, attachments = doc.get('message'), doc.get('_attachments')
    if (
        'key' in doc
        or not isinstance(message, dict)
        or message.get('body') is not None
        or not isinstance(attachments, dict)
    ):
        return None
    found = attachments.get(NAME)
    return found if isinstance(found, dict) and isinstance(found.get('length'), int) else None
