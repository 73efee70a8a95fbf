"""Counts the HTTP requests that a process sends with the library `requests`, and the documents that they write.

`counting` counts in this process. `record` makes a process, and what it forks, append a line for each request to a
file, from which another process reads with `recorded`.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from requests.adapters import HTTPAdapter

__all__ = ['Count', 'counting', 'record', 'recorded', 'written']

#: Called with the URL of a request and the number of documents that it writes or deletes.
OnRequest = Callable[[str, int], None]


@dataclass
class Count:
    """The number of requests sent, and of documents that they wrote or deleted."""

    requests: int = 0
    writes: int = 0


@contextmanager
def counting(database: str | None = None) -> Iterator[Count]:
    """Count the requests that this process sends, or only those to one database."""
    count, send = Count(), HTTPAdapter.send

    def add(url: str, writes: int) -> None:
        if database is None or unquote(urlsplit(url).path).split('/')[1] == database:
            count.requests += 1
            count.writes += writes

    _call(add)
    try:
        yield count
    finally:
        HTTPAdapter.send = send  # type: ignore[method-assign]


def record(path: Path) -> None:
    """Append a line for each request of this process, and of those that it forks, to a file: the documents written."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def append(url: str, writes: int) -> None:
        # A single write to a file opened with O_APPEND: lines of several processes do not mix.
        os.write(file, f'{writes}\n'.encode())

    _call(append)


def recorded(path: Path) -> Count:
    """Return the requests recorded in a file so far."""
    lines = path.read_text().split() if path.exists() else []
    return Count(len(lines), sum(map(int, lines)))


def written(method: str, url: str, body: Any) -> int:
    """Return the number of documents that a request writes or deletes."""
    path = url.partition('?')[0]
    if method == 'POST' and path.endswith('/_bulk_docs'):
        # A large body is a file in memory, which is read in blocks.
        return len(json.loads(body.getvalue() if isinstance(body, io.BytesIO) else body)['docs'])
    return 1 if method in ('PUT', 'DELETE') else 0


def _call(on_request: OnRequest) -> None:
    send = HTTPAdapter.send

    def counted(self: HTTPAdapter, request: Any, *args: Any, **kwargs: Any) -> Any:
        on_request(request.url, written(request.method, request.url, request.body))
        return send(self, request, *args, **kwargs)

    HTTPAdapter.send = counted  # type: ignore[method-assign]
