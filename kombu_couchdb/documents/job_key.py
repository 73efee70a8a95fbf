"""The job key: the header that makes a message a unique job, and the id that is made of it."""

from __future__ import annotations

import json
from typing import Any

from ..errors import ConfigurationError
from .ids import JOB

__all__ = ['JOB_KEY', 'job_id']

#: The name of the header.
JOB_KEY = 'job_key'
#: The maximum length of a job key, in characters.
_MAX_LENGTH = 500


def job_id(queue: str, task: Any, key: Any) -> str:
    """Return the id of a unique job; *raises* `ConfigurationError` unless `key` is text of 1 to 500 characters."""
    if not isinstance(key, str) or not 0 < len(key) <= _MAX_LENGTH or any('\ud800' <= char <= '\udfff' for char in key):
        raise ConfigurationError(f'the header {JOB_KEY} must be text of 1 to {_MAX_LENGTH} characters, not {key!r:.80}')
    # JSON keeps the three apart, whatever characters they have.
    return JOB + json.dumps([queue, task, key], ensure_ascii=False, separators=(',', ':'))
