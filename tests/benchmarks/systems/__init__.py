"""The compared systems, and which of them are reachable."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ..text import in_one_line
from .base import Place, System
from .couchdb import CouchDB, Raw
from .postgresql import PostgreSQL
from .rabbitmq import RabbitMQ
from .redis import Redis, RedisAlways

__all__ = ['NAMES', 'TITLES', 'Place', 'System', 'reachable']

#: Each system with the environment variable of its URL and the default, or None if it must be set.
_KNOWN: tuple[tuple[type[System], str, str | None], ...] = (
    (CouchDB, 'COUCHDB_URL', 'http://localhost:5984'),
    (Raw, 'COUCHDB_URL', 'http://localhost:5984'),
    (Redis, 'REDIS_URL', 'redis://localhost:6379/0'),
    (RedisAlways, 'REDIS_ALWAYS_URL', None),  # Redis does not sync each write by default
    (PostgreSQL, 'POSTGRES_URL', 'postgresql://postgres@localhost:5432/postgres'),
    (RabbitMQ, 'RABBITMQ_URL', 'amqp://guest:guest@localhost:5672//'),
)
NAMES = tuple(kind.name for kind, _, _ in _KNOWN)
#: The titles of all systems by name.
TITLES = {kind.name: kind.title for kind, _, _ in _KNOWN}


def reachable(names: Iterable[str]) -> tuple[dict[System, str], dict[str, str]]:
    """Return the reachable systems with their versions, and the names of the others with the reason."""
    found: dict[System, str] = {}
    absent: dict[str, str] = {}
    for kind, variable, default in _KNOWN:
        if kind.name not in names:
            continue
        url = os.environ.get(variable) or default
        if url is None:
            absent[kind.name] = f'{variable} is not set'
            continue
        system = kind(url)
        try:
            found[system] = system.version()
        except ImportError as exc:
            absent[kind.name] = f"the Python module {exc.name} is missing: pip install 'celery-couchdb[bench]'"
        except Exception as exc:  # each client has its own errors; all of them mean that this system cannot be measured
            absent[kind.name] = f'not reached; set {variable} ({in_one_line(exc)})'
    return found, absent
