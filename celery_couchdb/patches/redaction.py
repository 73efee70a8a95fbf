"""Masks for passwords in our URLs when Celery shows settings: `inspect conf`, `inspect report`, `celery report`.

Celery masks settings by name, and each version misses some: before 5.7 `broker_read_url` and `broker_write_url`, in 5.7
`CELERY_BROKER_URL` of Django's settings. This module finds our URLs in the values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from celery.app import utils

from kombu_couchdb.couchdb.redaction import redacted

__all__ = ['filter_hidden_settings', 'install']

#: Celery's mask.
_MASK = '*' * 8

_OURS = re.compile('couchdbs?://', re.IGNORECASE)

#: Celery's own functions. Before 5.7 it had no `sanitize_url`.
_filter_by_name = utils.filter_hidden_settings
_sanitize = getattr(utils, 'sanitize_url', None)


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
    """Return a masked copy of a value with our URLs; any other value itself."""
    if isinstance(value, str) and _OURS.search(value):
        return redacted(value, _MASK)
    if isinstance(value, Mapping):
        masked = {key: _mask(member) for key, member in value.items()}
        return masked if any(masked[key] is not member for key, member in value.items()) else value
    if isinstance(value, (list, tuple)) and any(isinstance(one, str) and _OURS.search(one) for one in value):
        return [_mask(one) for one in value]
    return value


def install() -> None:
    """Replace Celery's functions. The `celery` program and the result backend call this, too."""
    utils.filter_hidden_settings = filter_hidden_settings
    if _sanitize:  # before 5.7 Celery calls kombu's function, which `kombu_couchdb.registration` wraps
        utils.sanitize_url = _sanitize_url
