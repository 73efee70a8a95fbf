"""TLS: certificates are verified, client certificates are sent, and each error is one sentence."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from celery import Celery
from kombu import Connection
from urllib3.exceptions import InsecureRequestWarning

from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ConfigurationError, ServerUnavailable
from tests.conftest import PATIENCE
from tests.support import Inbox, publish


class TLSProxy:
    """A proxy on loopback that terminates TLS and forwards to the server; a context manager."""

    def __init__(self, server: Server, context: ssl.SSLContext) -> None:
        self._server, self._context = server, context
        self._listener = socket.create_server(('127.0.0.1', 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(here,), daemon=True).start()

    def _serve(self, here: socket.socket) -> None:
        try:
            with (
                self._context.wrap_socket(here, server_side=True) as inside,
                socket.create_connection((self._server.host, self._server.port)) as there,
            ):
                threading.Thread(target=_pass_on, args=(there, inside), daemon=True).start()
                _pass_on(inside, there)
        except OSError:
            pass  # the handshake failed, as some tests expect

    def __enter__(self) -> TLSProxy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _pass_on(here: socket.socket, there: socket.socket) -> None:
    try:
        while data := here.recv(65536):
            there.sendall(data)
        there.shutdown(socket.SHUT_RDWR)
    except (OSError, ValueError):
        pass  # one of the two sockets was closed


@pytest.fixture(scope='module')
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a CA (`ca.pem`) and certificates with keys.

    `server` and `client` are for localhost, `expired` is an expired server certificate, and `elsewhere` is for another
    host.
    """
    if shutil.which('openssl') is None:
        pytest.skip('openssl is not installed')
    folder = tmp_path_factory.mktemp('certificates')

    def openssl(arguments: str) -> None:
        subprocess.run(['openssl', *arguments.split()], cwd=folder, check=True, capture_output=True, timeout=PATIENCE)

    new = 'req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes'
    openssl(f'{new} -x509 -keyout ca.key -out ca.pem -days 2 -subj /CN=Test')
    for name, host, days in (
        ('server', 'localhost', 2),
        ('client', 'localhost', 2),
        ('expired', 'localhost', -1),
        ('elsewhere', 'elsewhere.example', 2),
    ):
        (folder / f'{name}.txt').write_text(f'subjectAltName=DNS:{host}\n')
        openssl(f'{new} -keyout {name}.key -out {name}.csr -subj /CN={name}')
        openssl(
            f'x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days {days} -out {name}.pem '
            f'-extfile {name}.txt'
        )
    return folder


@pytest.fixture
def secured(server: Server, client: Client, database: str, certificates: Path) -> Iterator[Callable[..., str]]:
    """A function that starts a TLS proxy and returns the URL of the test's database through it."""
    proxies: list[TLSProxy] = []

    def secured(certificate: str = 'server', *, needs_client: bool = False) -> str:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates / f'{certificate}.pem', certificates / f'{certificate}.key')
        if needs_client:
            context.load_verify_locations(certificates / 'ca.pem')
            context.verify_mode = ssl.CERT_REQUIRED
        proxies.append(TLSProxy(server, context))
        return (
            server.couchdb_url(database)
            .replace('couchdb://', 'couchdbs://')
            .replace(f'@{server.host}:{server.port}', f'@localhost:{proxies[-1].port}')
        )

    yield secured
    for proxy in proxies:
        proxy.__exit__()


def works(url: str, **options: object) -> None:
    with Connection(url, **options) as connection:
        publish(connection, 'hello')
        assert Inbox(connection).wait(1) == ['hello']


def test_ca_certificate_in_the_settings(secured: Callable[..., str], certificates: Path) -> None:
    works(secured(), ssl={'ca_certs': str(certificates / 'ca.pem')})


def test_client_certificate(secured: Callable[..., str], certificates: Path) -> None:
    files = {'ca_certs': 'ca.pem', 'certfile': 'client.pem', 'keyfile': 'client.key'}
    works(secured(needs_client=True), ssl={name: str(certificates / file) for name, file in files.items()})


def refused(url: str, authority: Path | None = None, **options: float) -> str:
    """Check that connecting fails before anything is sent, and return the error, which is one sentence."""
    with (
        pytest.raises(ServerUnavailable) as caught,
        Connection(
            url, ssl={'ca_certs': str(authority)} if authority else True, transport_options=options
        ) as connection,
    ):
        connection.connect()
    text = str(caught.value)
    assert '\n' not in text
    assert connection.password not in text
    return text


def test_missing_client_certificate(secured: Callable[..., str], certificates: Path) -> None:
    refused(secured(needs_client=True), certificates / 'ca.pem')  # the alert of the server may or may not arrive


@pytest.mark.parametrize(
    ('certificate', 'authority', 'host', 'told'),
    [
        ('server', None, 'localhost', "the server's TLS certificate could not be verified; give the CA file"),
        ('server', 'client.pem', 'localhost', "the server's TLS certificate could not be verified; give the CA file"),
        ('expired', 'ca.pem', 'localhost', "the server's TLS certificate is out of date"),
        ('elsewhere', 'ca.pem', 'localhost', "the server's TLS certificate is for another host"),
        ('server', 'ca.pem', '127.0.0.1', "the server's TLS certificate is for another host"),
    ],
)
def test_wrong_certificate_is_refused(
    secured: Callable[..., str], certificates: Path, certificate: str, authority: str | None, host: str, told: str
) -> None:
    url = secured(certificate).replace('@localhost:', f'@{host}:')
    assert told in refused(url, certificates / authority if authority else None)


def test_tls_to_a_plain_http_port_is_reported(url: str, client: Client) -> None:
    """CouchDB takes the TLS handshake for an incomplete request, and waits for the rest."""
    told = refused(f'{url.replace("couchdb://", "couchdbs://")}', connect_timeout=0.5)
    assert 'does the server speak TLS at this port? couchdb:// is plain HTTP' in told


def test_verification_can_be_switched_off(secured: Callable[..., str]) -> None:
    with pytest.warns(InsecureRequestWarning, match='Unverified'):
        works(secured(), ssl={'cert_reqs': ssl.CERT_NONE})


def test_missing_certificate_file(secured: Callable[..., str], certificates: Path) -> None:
    with (
        pytest.raises(ConfigurationError, match=r'no-such\.pem'),
        Connection(secured(), ssl={'ca_certs': str(certificates / 'no-such.pem')}) as connection,
    ):
        connection.connect()


def test_results_over_tls(secured: Callable[..., str], certificates: Path) -> None:
    app = Celery('tls', set_as_current=False, backend=f'{secured()}?ssl_ca_certs={certificates / "ca.pem"}')
    app.backend.store_result('a', 42, 'SUCCESS')
    assert app.AsyncResult('a').get(timeout=PATIENCE) == 42
    app.close()
