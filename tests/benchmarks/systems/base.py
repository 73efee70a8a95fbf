"""Base class of the systems under test, and the place where a case is measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

__all__ = ['Place', 'System', 'fresh_name']


@dataclass(frozen=True)
class Place:
    """A queue of its own and the result backend; can be pickled for another process."""

    #: The broker's URL for Celery; for the raw limit, the HTTP URL of the database.
    broker: str = field(repr=False)
    queue: str
    #: The URL of Celery's result backend, or None if there is none.
    backend: str | None = field(default=None, repr=False)
    #: `broker_transport_options`.
    options: dict[str, Any] = field(default_factory=dict)
    #: Additional settings of Celery.
    settings: dict[str, Any] = field(default_factory=dict)
    #: Whether the raw loop serves it instead of kombu.
    raw: bool = False

    def part(self, number: int) -> Place:
        """Return the same place with another queue."""
        return replace(self, queue=f'{self.queue}-{number}')


class System(ABC):
    """A broker with its result backend. The name is used in options and columns; the title is for readers."""

    name: str
    title: str
    #: The name of the server software, for the list of versions.
    server: str
    #: Whether any process can store and get results by their id.
    keeps_results = True
    #: Whether a million messages can be sent in a reasonable time.
    fills_fast = True
    default_port: int

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def version(self) -> str:
        """Return the version of the server; *raises* the client's own error if it cannot be reached."""

    @abstractmethod
    def place(self) -> AbstractContextManager[Place]:
        """Return a context manager with a fresh place, which is deleted afterwards with its content."""

    def requests(self) -> int | None:
        """Return the number of HTTP requests that the server has answered, or None if it has no such count."""
        return None

    @property
    def host(self) -> str:
        """The host of the server."""
        return urlsplit(self.url).hostname or 'localhost'

    @property
    def port(self) -> int:
        """The port of the server."""
        return urlsplit(self.url).port or self.default_port


def fresh_name() -> str:
    """Return a new unique name for a queue or database."""
    return f'bench-{uuid4().hex[:12]}'
