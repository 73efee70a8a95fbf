"""Storage of message bodies: small ones in the document, as text or base64; large ones as attachments.

A document that has its body as an attachment is read and written without it: readers get a *stub*, which they write back. So it
costs the same to claim, release or bury a message of 20 kB and one of 20 MB.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from ..errors import Unstorable

__all__ = ['attached', 'decoded', 'encoded', 'is_large', 'stub']

Document = dict[str, Any]

#: The name of the attachment. CouchDB would compress one of a text type; it has whatever bytes the message had.
NAME, _TYPE = 'body', 'application/octet-stream'

#: The size from which on a body is attached, in characters as it is stored. (Measured on CouchDB 3.5: see docs/production/performance.rst.)
LARGE = 16_000


def encoded(body: Any, encoding: str | None = None) -> tuple[Any, str | None]:
    """Return a body as it is stored, and its `body_encoding`; `encoding` is what the message says of it."""
    if isinstance(body, bytes) and str(encoding).lower() in ('utf-8', 'utf8', 'us-ascii', 'ascii'):
        try:
            return body.decode('utf-8'), 'utf-8'
        except UnicodeDecodeError:
            pass  # it says that it is text, and is not
    if isinstance(body, bytes):
        return base64.b64encode(body).decode('ascii'), 'base64'
    return body, 'utf-8'


def decoded(body: Any, body_encoding: str | None = None) -> Any:
    """Return a body as it was sent, from what the document has of it or the bytes of the attachment; *raises* `ValueError`."""
    if body_encoding not in ('base64', 'utf-8', None):
        raise ValueError(f'unknown body_encoding {body_encoding!r}')
    if isinstance(body, bytes):
        return body if body_encoding == 'base64' else body.decode('utf-8')
    return base64.b64decode(body, validate=True) if body_encoding == 'base64' else body


def is_large(message: Mapping[str, Any]) -> bool:
    """Tell whether the body of a message is large enough to be attached."""
    body = message.get('body')
    return isinstance(body, str) and len(body) > LARGE


def attached(message: Mapping[str, Any]) -> Document:
    """Return what a document has of a message whose body, as `encoded` returns it, is an attachment."""
    body, properties = message['body'], message.get('properties') or {}
    if properties.get('body_encoding') != 'base64':
        try:
            body = base64.b64encode(body.encode('utf-8')).decode('ascii')
        except UnicodeEncodeError as exc:
            raise Unstorable('what is to be stored has text in it that is none: half of a surrogate pair') from exc
    return {'message': {**message, 'body': None}, '_attachments': {NAME: {'content_type': _TYPE, 'data': body}}}


def stub(doc: Mapping[str, Any]) -> Document | None:
    """Return the stub of the attachment that is the body of a document's message, or None if it is in the document."""
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
