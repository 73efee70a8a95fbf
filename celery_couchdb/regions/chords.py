"""Detection of messages of the header of a chord: they stay in the region where their results are counted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kombu.exceptions import KombuError
from kombu.serialization import prepare_accept_content

from kombu_couchdb.documents.body import decoded, loaded
from kombu_couchdb.errors import Unstorable

from ..parcels.check import UNSAFE_CONTENT

__all__ = ['may_be_in_header']


def may_be_in_header(message: Mapping[str, Any], body: bytes | None, content: Collection[str]) -> bool:
    """Tell whether a task, or a later step of its chain, is in the header of a chord; True if it cannot be decoded.

    `body` is the attached body, or None; `content` is the app's `accept_content`. Pickle and YAML are not decoded.
    """
    try:
        text = decoded(message['body'] if body is None else body, message['properties'].get('body_encoding'))
        _, _, embedded = loaded(message, text, prepare_accept_content(set(content) - UNSAFE_CONTENT))
        steps = embedded.get('chain') or []
        return bool(embedded.get('chord') or any((step.get('options') or {}).get('chord') for step in steps))
    except (KombuError, Unstorable, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return True
