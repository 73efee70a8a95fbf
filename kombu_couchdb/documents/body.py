"""Storage of message bodies: small ones in the document, as text or base64; large ones as attachments.

A document whose body is an attachment is read and written without it: readers get a *stub*, and write that back. So
claims, releases and dead letters cost the same for a message of 20 kB and for one of 20 MB.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from ..errors import Unstorable
from .types import Attachment, Document, Message

__all__ = ['attached', 'decoded', 'encoded', 'is_large', 'stub']

#: The name and type of the attachment, which has the bytes of the message. CouchDB would compress an attachment of a
#: text type.
NAME, _TYPE = 'body', 'application/octet-stream'

#: Bodies that are longer are attached; in characters as stored. (Measured on CouchDB 3.5: see docs/production/performance.rst.)
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
    """Return a body as it was sent, from a document's member or an attachment's bytes; *raises* `ValueError`."""
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
    """Return a message without its body, as `encoded` returns it, and the attachments of the document with the body."""
    body, properties = message['body'] or '', message.get('properties') or {}
    if properties.get('body_encoding') != 'base64':
        try:
            body = base64.b64encode(body.encode('utf-8')).decode('ascii')
        except UnicodeEncodeError as exc:
            raise Unstorable('what is to be stored has text in it that is none: half of a surrogate pair') from exc
    return {**message, 'body': None}, {NAME: {'content_type': _TYPE, 'data': body}}


def stub(doc: Mapping[str, Any]) -> Document | None:
    """Return the stub of the attachment with the body of a document; None if the body is in the document."""
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
