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
from kombu.utils.encoding import safe_repr

from kombu_couchdb.couchdb.urls import redacted

__all__ = ['filter_hidden_settings', 'install', 'mask_graph']

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


def mask_graph() -> None:
    """Let `celery graph workers` show the URL of our result backend without passwords. The `celery` program calls this.

    Celery takes the URL from the settings as it is, unless the command has an argument `backend:…`.
    """
    from celery.bin.graph import workers

    show = workers.invoke

    def masked(context: Any) -> Any:
        url = context.obj.app.conf.result_backend
        if isinstance(url, str) and _OURS.search(url):
            context.args.insert(0, f'backend:{redacted(url)}')
        return show(context)

    workers.invoke = masked


def install() -> None:
    """Replace Celery's functions. The `celery` program and the result backend call this, too."""
    utils.filter_hidden_settings = filter_hidden_settings
    if _sanitize:  # before 5.7 Celery calls kombu's function, which `kombu_couchdb.registration` wraps
        utils.sanitize_url = _sanitize_url
