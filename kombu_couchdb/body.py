"""How a message's body stands in its document: text as it is, to be read by people, and everything else as base64."""

from __future__ import annotations

import base64
from typing import Any

__all__ = ['decoded', 'encoded']


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
    """Return a body as it was sent; *raises* `ValueError` if it is spoilt."""
    if body_encoding not in ('base64', 'utf-8', None):
        raise ValueError(f'unknown body_encoding {body_encoding!r}')
    return base64.b64decode(body, validate=True) if body_encoding == 'base64' else body
