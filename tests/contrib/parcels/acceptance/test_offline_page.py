"""`examples/offline`: the page in a real browser takes orders offline, and shows what became of them."""

from __future__ import annotations

import json
import shutil
import threading
from contextlib import ExitStack
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests

from celery_couchdb.testing import Server
from kombu_couchdb.contrib.parcels.stored_parcels import Parcels
from kombu_couchdb.couchdb.client import Client
from tests.acceptance.conftest import Site
from tests.acceptance.test_examples import Example
from tests.browser import Page
from tests.chaos.proxy import Proxy
from tests.conftest import PATIENCE, wait_for
from tests.device import pouchdb
from tests.support import ROOT

EXAMPLE = ROOT / 'examples/offline'

#: The settings of CORS in the example's README.
CORS = {
    'chttpd/enable_cors': 'true',
    'cors/credentials': 'true',
    'cors/headers': 'accept, authorization, content-type, origin, referer',
    'cors/methods': 'GET, PUT, POST, HEAD, DELETE',
}


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def pages(tmp_path: Path, stack: ExitStack) -> ThreadingHTTPServer:
    """A server with the files of the example, and PouchDB from npm."""
    folder = tmp_path / 'page'
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns('node_modules', '__pycache__'))
    (folder / 'node_modules').symlink_to(pouchdb() / 'node_modules')
    server = ThreadingHTTPServer(('127.0.0.1', 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    return server


def allow(server: Server, origin: str, stack: ExitStack) -> None:
    """Let pages from `origin` reach Apache CouchDB until the end of the test."""
    for name, value in {**CORS, 'cors/origins': origin}.items():
        url = f'{server.url}/_node/_local/_config/{name}'
        if before := requests.put(url, json=value, timeout=PATIENCE).json():
            stack.callback(requests.put, url, json=before, timeout=PATIENCE)
        else:
            stack.callback(requests.delete, url, timeout=PATIENCE)


def orders(page: Page) -> list[str]:
    """Return the orders that the page shows, the newest first."""
    found: list[str] = page.run("Array.from(document.querySelectorAll('#orders li'), item => item.innerText)")
    return [text.replace('\n', ' | ') for text in found]


def order(page: Page, article: str, count: int) -> None:
    page.run(
        f"find('order').article.value = '{article}'; find('order').count.value = {count};find('order').requestSubmit()"
    )


def test_readme_has_the_settings_of_this_test() -> None:
    text = (EXAMPLE / 'README.rst').read_text()
    for name, value in CORS.items():
        assert f'{name.partition("/")[2]} = {value}\n' in text


def test_orders_that_were_put_offline(
    site: Site, parcels: Client, pages: ThreadingHTTPServer, apache_couchdb: bool, stack: ExitStack, tmp_path: Path
) -> None:
    origin = f'http://127.0.0.1:{pages.server_port}'
    if apache_couchdb:
        allow(site.server, origin, stack)
    proxy = stack.enter_context(Proxy(site.server.host, site.server.port))
    proxy.refuse()  # the network is away
    page = Page(tmp_path / 'profile', origin)
    stack.callback(page.close)
    page.wait(lambda: page.run("typeof connect === 'function'"), 'the page')
    login = {
        'url': f'http://127.0.0.1:{proxy.port}/{parcels.address.database}',
        'user': site.server.user,
        'password': site.server.password,
    }
    for name, value in login.items():
        page.run(f"find('login').{name}.value = {json.dumps(value)}")
    page.run("find('login').requestSubmit()")
    order(page, 'bread', 3)
    wait_for(lambda: len(orders(page)) == 1, 'the order')
    order(page, 'wine', 1)
    wait_for(lambda: len(orders(page)) == 2, 'the order')
    page.run("find('refund').click()")
    wait_for(lambda: len(orders(page)) == 3, 'the refund')
    assert [text.partition(' | ')[2] for text in orders(page)] == 3 * ['waiting: it waits on this device']
    page.run('navigator.serviceWorker.ready.then(() => true)')
    pages.shutdown()
    pages.server_close()  # the page itself cannot be loaded any more
    page.reload()
    wait_for(lambda: len(orders(page)) == 3, 'the page, offline')
    assert list(Parcels(parcels).ids('waiting', 'refused')) == []
    proxy.restore()
    wait_for(lambda: all('delivered' in text for text in orders(page)), 'the delivery')
    example = Example(site, 'offline')
    example.environment['SHOP_PARCELS'] = parcels.address.database
    example.worker()
    wanted = [
        "a refund of 5.00 € | refused: task 'shop.refund' is not in parcels_accept",
        '1 × wine | failed: ValueError: wine is sold out',
        '3 × bread | done: the bill is 10.50 €',
    ]
    wait_for(lambda: orders(page) == wanted, 'what became of the orders')
