"""Masks for passwords in our URLs when Celery shows settings.

These are `inspect conf`, `inspect report`, `celery report` and `celery graph workers`.

Celery masks settings by name, and each version misses some: before 5.7 `broker_read_url` and `broker_write_url`, in 5.7
`CELERY_BROKER_URL` of Django's settings. This module finds our URLs in the values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from celery.app import utils
from celery.utils.graph import GraphFormatter
from kombu.utils.encoding import safe_repr

from kombu_couchdb import registration
from kombu_couchdb.couchdb.address import redacted

#: Celery's mask.
_MASK = '*' * 8

_OURS = re.compile('couchdbs?://', re.IGNORECASE)

#: Celery's own functions. Before 5.7 it had no `sanitize_url`.
_filter_by_name = utils.filter_hidden_settings
_sanitize = getattr(utils, 'sanitize_url', None)
_format_graph = GraphFormatter.FMT


def filter_hidden_settings(conf: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a copy of settings with masked secrets: passwords in our URLs, and what Celery masks by name."""
    masked = {key: _mask(value) for key, value in conf.items()}
    others = {
        key: value for key, value in conf.items() if masked[key] is value or utils.HIDDEN_SETTINGS.search(str(key))
    }
    return {**masked, **_filter_by_name(others)}


def _sanitize_url(url: Any, mask: str = _MASK) -> Any:
    return redacted(url, mask) if isinstance(url, str) and _OURS.match(url) else _sanitize(url, mask)  # type: ignore[misc]


def _mask(value: Any) -> Any:
    """Return a masked copy of a value with our URLs; any other value itself. Of an object that is what is shown."""
    if isinstance(value, str):
        return redacted(value, _MASK) if _OURS.search(value) else value
    if not _OURS.search(shown := safe_repr(value)):
        return value
    if isinstance(value, Mapping):
        return {_mask(key): _mask(member) for key, member in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        masked = map(_mask, value)
        return [*masked] if isinstance(value, list) else (*masked,)
    return redacted(shown, _MASK)


def _format_masked(self: Any, fmt: str, *args: Any, **kwargs: Any) -> Any:
    """Format a node of `celery graph workers`, whose label may be the URL of a result backend."""
    return _format_graph(self, fmt, *(_masked_label(each) for each in args), **kwargs)


def _masked_label(label: Any) -> Any:
    return redacted(label) if isinstance(label, str) and _OURS.match(label) else label


def install() -> None:
    """Replace Celery's functions, and the one of kombu."""
    registration.mask()
    utils.filter_hidden_settings, GraphFormatter.FMT = filter_hidden_settings, _format_masked
    if _sanitize:  # before 5.7 Celery calls kombu's function
        utils.sanitize_url = _sanitize_url
