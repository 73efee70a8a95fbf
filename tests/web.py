"""The page of operators over HTTP, and a browser without scripts for it."""

from __future__ import annotations

import html
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import requests
import uvicorn

from tests.conftest import PATIENCE, wait_for


@contextmanager
def served(page: Any, lifespan: Any = 'off') -> Iterator[str]:
    """Serve an ASGI application in a thread of this process, and yield its URL. With `lifespan` on, it must start."""
    config = uvicorn.Config(page, port=0, log_level='critical', lifespan=lifespan, timeout_graceful_shutdown=1)
    server, socket = uvicorn.Server(config), config.bind_socket()
    thread = threading.Thread(target=server.run, args=([socket],), daemon=True)
    thread.start()
    wait_for(lambda: server.started, 'the page')
    yield f'http://127.0.0.1:{socket.getsockname()[1]}'
    server.should_exit = True
    thread.join(PATIENCE)
    socket.close()


class Browser:
    """A browser that knows neither scripts nor styles."""

    def __init__(self, url: str, **headers: str) -> None:
        self.url, self.session = url, requests.Session()
        self.session.headers.update({'Accept': 'text/html', **headers})
        self.page = requests.Response()

    def get(self, path: str, **settings: Any) -> requests.Response:
        """Load a page, and follow where it leads."""
        self.page = self.session.get(self.url + path, timeout=PATIENCE, **settings)
        return self.page

    def post(self, path: str, **fields: Any) -> requests.Response:
        """Send a form with the token of the page that is shown."""
        token = re.search(r'name="token" value="([^"]*)"', self.page.text)
        given = {'token': token[1] if token else '', **fields}
        self.page = self.session.post(self.url + path, given, timeout=PATIENCE)
        return self.page

    def log_in(self, user: str, password: str) -> requests.Response:
        """Log in, and return the page that is shown then."""
        return self.post('/login', user=user, password=password)

    @property
    def text(self) -> str:
        """The text of the page as people read it."""
        found = re.sub(r'<[^>]*>', ' ', '<main' + self.page.text.partition('<main')[2])
        return ' '.join(html.unescape(found).split())

    @contextmanager
    def events(self) -> Iterator[Iterator[str]]:
        """Open the stream of events, and yield the names of those that come."""
        with self.session.get(f'{self.url}/events', stream=True, timeout=PATIENCE) as response:
            yield (line.removeprefix('event: ') for line in _lines(response) if line.startswith('event: '))


def _lines(response: requests.Response) -> Iterator[str]:
    return (line for line in response.iter_lines(chunk_size=1, decode_unicode=True))


def read(browser: Browser, path: str) -> Any:
    """Return the JSON of a page."""
    return browser.session.get(browser.url + path, headers={'Accept': 'application/json'}).json()


def rows_of(browser: Browser, path: str) -> list[str]:
    """Return the texts of the rows of a page."""
    browser.get(path)
    return [row.partition('</tr>')[0] for row in browser.page.text.split('<tr id="row-')[1:]]
