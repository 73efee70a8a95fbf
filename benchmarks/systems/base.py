"""What every system under test has: a name, a version, and fresh places to be measured in."""

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
    """A queue that nobody else uses, and where results go. It can be sent to another process."""

    #: The broker's URL, as a Celery user writes it; of the raw limit, the database's over HTTP.
    broker: str = field(repr=False)
    queue: str
    #: The URL of Celery's result backend, or None if there is none.
    backend: str | None = field(default=None, repr=False)
    #: `broker_transport_options`.
    options: dict[str, Any] = field(default_factory=dict)
    #: More of Celery's settings.
    settings: dict[str, Any] = field(default_factory=dict)
    #: Whether it is served by the bare loop instead of kombu.
    raw: bool = False

    def part(self, number: int) -> Place:
        """Return the same place with another queue."""
        return replace(self, queue=f'{self.queue}-{number}')


class System(ABC):
    """A broker with its results. The name is that of an option and of a column; the title is for people."""

    name: str
    title: str
    #: What is running there, for the list of versions.
    server: str
    #: Whether results can be stored and got by their id, whoever asks for them.
    keeps_results = True
    #: Whether a million messages can be put there in a reasonable time.
    fills_fast = True
    default_port: int

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def version(self) -> str:
        """Return the server's version; *raises* whatever its client does if it cannot be reached."""

    @abstractmethod
    def place(self) -> AbstractContextManager[Place]:
        """Return a fresh place, which is removed afterwards with all that is in it."""

    def requests(self) -> int | None:
        """Return how many HTTP requests the server has answered so far, or None if it does not tell."""
        return None

    @property
    def host(self) -> str:
        """Where the server is."""
        return urlsplit(self.url).hostname or 'localhost'

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return urlsplit(self.url).port or self.default_port


def fresh_name() -> str:
    """Return a name for a queue or database that was never used."""
    return f'bench-{uuid4().hex[:12]}'
