"""Passwords in URLs of ours are hidden when Celery shows an app's settings: `inspect conf`, `inspect report`, `celery report`.

Celery hides them by the names of the settings, and each version misses some: before 5.7 `broker_read_url`, `broker_write_url`,
in 5.7 `CELERY_BROKER_URL` of Django's settings. Here they are found by the value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from celery.app import utils

from kombu_couchdb.couchdb.redaction import redacted

__all__ = ['filter_hidden_settings', 'install']

#: What Celery shows instead of a password.
_MASK = '*' * 8

_OURS = re.compile('couchdbs?://', re.IGNORECASE)

#: Celery's own functions.
_filter_by_name = utils.filter_hidden_settings
_sanitize = getattr(utils, 'sanitize_url', None)


def filter_hidden_settings(conf: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return settings without what is secret in them."""
    shown = {key: _shown(value) for key, value in conf.items()}
    others = {
        key: value for key, value in conf.items() if shown[key] is value or utils.HIDDEN_SETTINGS.search(str(key))
    }
    return {**shown, **_filter_by_name(others)}


def _sanitize_url(url: Any, mask: str = _MASK) -> Any:
    return redacted(url, mask) if isinstance(url, str) and _OURS.match(url) else _sanitize(url, mask)  # type: ignore[misc]


def _shown(value: Any) -> Any:
    """Return a value without passwords if it has URLs of ours, else the value itself."""
    if isinstance(value, str) and _OURS.search(value):
        return redacted(value, _MASK)
    if isinstance(value, (list, tuple)) and any(isinstance(one, str) and _OURS.search(one) for one in value):
        return [_shown(one) for one in value]
    return value


def install() -> None:
    """Replace Celery's functions; the `celery` program and the result backend call this."""
    utils.filter_hidden_settings = filter_hidden_settings
    if _sanitize:  # before 5.7 kombu's function is called instead, see `kombu_couchdb.registration`
        utils.sanitize_url = _sanitize_url
