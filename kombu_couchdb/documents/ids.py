"""Ids of documents: their prefixes, by type of document, and the ids of unique jobs."""

from __future__ import annotations

import json
from typing import Any

from ..errors import ConfigurationError

#: All documents in the broker's database that are not messages.
BROKER = 'broker:'

BINDING, BROADCAST, CONSUMER, LEADER, QUEUE = (
    BROKER + kind for kind in ('binding:', 'broadcast:', 'consumer:', 'leader:', 'queue:')
)

#: Pauses of queues. The prefix sorts between `BROADCAST` and `CONSUMER`, so that a busy consumer reads these documents
#: with the others that it polls.
PAUSE = BROKER + 'closed:'

#: What operators did, see `celery_couchdb.audit`.
AUDIT = BROKER + 'audit:'

#: What ended and what waited in ten minutes of the day; see `celery_couchdb.contrib.metrics.history`.
HISTORY = BROKER + 'history:'

#: In the broadcasts database: the notice, and the bells of queues.
NOTICE, BELL = 'notice', 'bell:'

#: Unique jobs; messages published within `idempotent`.
#: The ids of other messages have no prefix.
JOB, ONCE = 'job:', 'once:'

#: Slots of concurrency limits. They are not below `BROKER`: the changes feeds of consumers report deletions there.
SLOT = 'slot:'

#: The next starts of rate keys. Also the beginning of `parked.key` of messages that wait for one.
RATE = 'rate:'


#: The name of the header.
JOB_KEY = 'job_key'
#: The maximum length of the keys of jobs, limits and rates, in characters.
_MAX_LENGTH = 500


def key_problem(header: str, key: Any) -> str | None:
    """Return what is wrong with the key in a header; None if it is valid."""
    if not isinstance(key, str) or not 0 < len(key) <= _MAX_LENGTH or any('\ud800' <= char <= '\udfff' for char in key):
        return f'the header {header} must be text of 1 to {_MAX_LENGTH} characters, not {key!r:.80}'
    return None


def job_id(queue: str, task: Any, key: Any) -> str:
    """Return the id of a unique job; *raises* `ConfigurationError` unless `key` is text of 1 to 500 characters."""
    if reason := key_problem(JOB_KEY, key):
        raise ConfigurationError(reason)
    # JSON keeps the three apart, whatever characters they have.
    return JOB + json.dumps([queue, task, key], ensure_ascii=False, separators=(',', ':'))
