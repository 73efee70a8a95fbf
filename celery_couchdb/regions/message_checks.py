"""Checks of the messages that come from other regions, and of those that go there.

Regions trust each other as workers of one database do: any task, queue and content type is accepted, but the parcel
must be a message that workers can read. The ids of parcels name their senders. By these ids, replications leave out
parcels that a region has written in the name of another one.

Messages of the header of a chord stay in the region where their results are counted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kombu.exceptions import KombuError
from kombu.serialization import prepare_accept_content

from kombu_couchdb.documents.body import decoded, loaded
from kombu_couchdb.documents.task_message import is_task
from kombu_couchdb.documents.types import Document
from kombu_couchdb.documents.validation import check_names, check_value, flaw
from kombu_couchdb.errors import Unstorable

from ..parcels.parcel_checks import UNSAFE_CONTENT, ParcelRefused

#: Properties that the transport of the receiving region sets.
_OF_TRANSPORTS = ('body_encoding', 'delivery_info', 'delivery_tag')


def message_of(doc: Mapping[str, Any], body: bytes | None) -> Document:
    """Return the message in a parcel, with its body as the publisher sent it; `body` is the attachment, if it has one.

    *Raises* `ParcelRefused` if the parcel is malformed.
    """
    if 'message' not in doc:
        raise ParcelRefused('it has no message')
    if reason := flaw({**doc, 'attempts': 0, 'date': None, 'claimed': None}):
        raise ParcelRefused(reason)
    message = doc['message']
    if body is None and message['body'] is None:
        raise ParcelRefused('its body is missing')
    properties = {name: value for name, value in message['properties'].items() if name not in _OF_TRANSPORTS}
    if not is_task(message['headers']):
        raise ParcelRefused('its headers name no task, or no id')
    try:
        check_names(exchange=doc.get('exchange'), routing_key=doc.get('routing_key'))
        check_value('the message', {**message, 'body': None})
        sent = decoded(message['body'] if body is None else body, message['properties'].get('body_encoding'))
    except (Unstorable, ValueError, TypeError) as exc:
        raise ParcelRefused(f'its body or its headers cannot be read: {exc}'[:500]) from exc
    return {**message, 'body': sent, 'properties': properties}


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
