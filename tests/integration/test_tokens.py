"""Tokens on a real server, which checks them itself, and behind a gateway: messages, results, refusals, rotation."""

from __future__ import annotations

import base64
import hmac
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import requests
from celery import Celery

from celery_couchdb.cli.clients import Login, broker_of
from celery_couchdb.connections import producer_as
from celery_couchdb.testing import Server
from examples.managed.service import TOKENS, Service
from kombu_couchdb.contrib.regions.region import addresses
from kombu_couchdb.couchdb import auth
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.call import HTTPOptions
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.server import Server as CouchServer
from kombu_couchdb.errors import AccessDenied, ServerUnavailable
from kombu_couchdb.options import Options
from tests.conftest import PATIENCE, PATIENT, PATIENT_BROKER, wait_for
from tests.support import Inbox, command_of, end
from tests.tokens import Gateway, Sign, TokenServer, hs256, token

#: The user whom tokens name. CouchDB has no document of it.
USER = f'user-{uuid.uuid4().hex[:12]}'


def needs(server: Server, handler: str) -> None:
    """Skip the test if the server does not have a handler of authentication, which only a restart can add."""
    info = requests.get(f'{server.url}/_session', timeout=PATIENCE).json().get('info') or {}
    if handler not in info.get('authentication_handlers', ()):
        pytest.skip(f'the server has no {handler}_authentication_handler in [chttpd] authentication_handlers')


@pytest.fixture(scope='module')
def keys(server: Server) -> Iterator[Callable[[str, str], str]]:
    """A function that lets the server accept a key, and returns its id; the kinds of keys are hmac, rsa and ec."""
    needs(server, 'jwt')
    config, added = f'{server.url}/_node/_local/_config/jwt_keys', list[str]()

    def add(kind: str, key: str) -> str:
        kid = f'tests-{uuid.uuid4().hex}'
        added.append(f'{config}/{quote(f"{kind}:{kid}", safe="")}')
        assert requests.put(added[-1], json=key, timeout=PATIENCE).status_code == 200
        return kid

    yield add
    for url in added:
        requests.delete(url, timeout=PATIENCE)


class Signer:
    """Signs tokens with a key that the server accepts."""

    def __init__(self, algorithm: str, kid: str, sign: Sign) -> None:
        self.header, self.sign = {'alg': algorithm, 'kid': kid}, sign

    def token(self, seconds: float = 3600, **more: Any) -> str:
        """Return a token of `USER`."""
        header = {**self.header, **more.pop('header', {})}
        return token(USER, seconds, more.pop('sign', self.sign), header, **more)


@pytest.fixture(scope='module')
def hmac_signer(keys: Callable[[str, str], str]) -> Signer:
    secret = uuid.uuid4().bytes * 2
    return Signer('HS256', keys('hmac', base64.b64encode(secret).decode()), hs256(secret))


@pytest.fixture(scope='module', params=['HS256', 'RS256', 'ES256'])
def signer(keys: Callable[[str, str], str], request: pytest.FixtureRequest) -> Signer:
    """A signer with each algorithm."""
    algorithm = request.param
    if algorithm == 'HS256':
        found: Signer = request.getfixturevalue('hmac_signer')
        return found
    pytest.importorskip('cryptography')
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa, utils

    if algorithm == 'RS256':
        rsa_key = rsa.generate_private_key(65537, 2048)
        public: Any = rsa_key.public_key()

        def sign(text: bytes) -> bytes:
            return rsa_key.sign(text, padding.PKCS1v15(), hashes.SHA256())
    else:
        ec_key = ec.generate_private_key(ec.SECP256R1())
        public = ec_key.public_key()

        def sign(text: bytes) -> bytes:
            numbers = utils.decode_dss_signature(ec_key.sign(text, ec.ECDSA(hashes.SHA256())))
            return b''.join(number.to_bytes(32, 'big') for number in numbers)

    info = serialization.PublicFormat.SubjectPublicKeyInfo
    pem = public.public_bytes(serialization.Encoding.PEM, info).decode().replace('\n', '\\n')
    return Signer(algorithm, keys({'RS256': 'rsa', 'ES256': 'ec'}[algorithm], pem), sign)


@pytest.fixture
def app(server: Server, database: str, client: Client) -> Iterator[Celery]:
    """An app whose settings have no user, for databases with `USER` as their member."""
    results = server.client(f'{database}-results')
    results.create()
    for each in (client, results):
        each.request('PUT', '/_security', body={'members': {'names': [USER]}, 'admins': {'names': [USER]}})
    app = Celery('tokens', set_as_current=False, backend=results.address.url.replace('http', 'couchdb'))
    app.conf.update(broker_transport_options=PATIENT_BROKER, result_backend_transport_options=PATIENT)
    yield app
    end(app)
    results.delete()
    results.close()


def use(app: Celery, server: Server | Gateway, database: str, secret: str = '', **options: Any) -> None:
    """Let the app use a server with these options; `secret` is in the URLs."""
    at = f'127.0.0.1:{server.port}' if isinstance(server, Gateway) else f'{server.host}:{server.port}'
    login = f':{quote(secret, safe="")}@' if secret else ''
    app.conf.update(
        broker_url=f'couchdb://{login}{at}/{database}',
        result_backend=f'couchdb://{at}/{database}-results',  # with the token of the broker's URL
        broker_transport_options={**PATIENT_BROKER, **options},
    )


def work(app: Celery) -> None:
    """Send a message, receive it, store a result and wait for it."""
    with app.connection_for_read() as connection:
        inbox = Inbox(connection, 'celery')
        sent = app.send_task('add', (1, 2))
        inbox.wait(1)
        app.backend.store_result(sent.id, 3, 'SUCCESS')
        assert sent.get(timeout=PATIENCE) == 3


# -- tokens that CouchDB checks


def test_messages_and_results(app: Celery, server: Server, database: str, signer: Signer) -> None:
    use(app, server, database, signer.token(), auth='jwt')
    work(app)
    with app.connection_for_write() as connection:
        assert connection.transport.couchdb.user == USER


def test_login_method_in_the_urls(app: Celery, server: Server, database: str, hmac_signer: Signer) -> None:
    login, at = hmac_signer.token(), f'{server.host}:{server.port}'
    app.conf.update(
        broker_url=f'couchdb://127.0.0.1:1/x;couchdb://:{login}@{at}/{database}?login_method=jwt',
        result_backend=f'couchdb://:{login}@{at}/{database}-results?login_method=jwt',
    )
    work(app)


def test_administrator_with_a_password(app: Celery, server: Server, database: str, hmac_signer: Signer) -> None:
    """It makes the user of the app's tokens a member; CouchDB has no document of this user."""
    for name in (database, f'{database}-results'):
        server.client(name).request('PUT', '/_security', body={'members': {'roles': ['_admin']}})
    use(app, server, database, hmac_signer.token(), auth='jwt')
    with pytest.raises(AccessDenied, match='You are not allowed to access this db'):
        app.backend.client.info()
    done = command_of(app, COUCHDB_ADMIN_PASSWORD=server.password)('setup', '--admin', server.user)
    assert (done.exit_code, 'create it in CouchDB' in done.output) == (0, False)
    assert f'only administrators and members may read and write, among them {USER}' in done.output
    work(app)


@pytest.mark.parametrize(
    ('change', 'reason'),
    [
        ({'seconds': -10}, 'exp not in future'),
        ({'exp': None}, 'Missing exp claim'),
        ({'sub': None}, 'Token missing sub claim'),
        ({'sign': hs256(b'another key')}, 'Bad HMAC'),
        ({'header': {'kid': 'unknown'}}, 'Unknown kid'),
        ({'header': {'alg': 'none'}}, 'Invalid alg header parameter'),
        ({'header': {'alg': 'RS256'}}, 'Unknown kid'),
    ],
)
def test_refused_token_is_one_sentence(
    app: Celery, server: Server, database: str, hmac_signer: Signer, change: dict[str, Any], reason: str
) -> None:
    given = hmac_signer.token(**change)
    use(app, server, database, given, auth='jwt')
    user = f" of user '{USER}'" * ('sub' not in change)
    text = f'^http://{server.host}:{server.port} refused the token{user}: {reason}; replace it$'
    for _ in range(2):
        with pytest.raises(AccessDenied, match=text) as caught, app.connection_for_write() as connection:
            connection.connect()
        assert given not in str(caught.value)
        with pytest.raises(AccessDenied, match=text):
            app.backend.store_result('x', 3, 'SUCCESS')


def test_user_without_a_right(server: Server, database: str, client: Client, hmac_signer: Signer) -> None:
    client.request('PUT', '/_security', body={'members': {'names': ['other']}})
    other = server.client(database, user=None, password=hmac_signer.token(), auth='jwt')
    with pytest.raises(AccessDenied, match=f"refused user '{USER}': You are not allowed to access this db; let"):
        other.info()
    with pytest.raises(AccessDenied, match=f"refused user '{USER}': You are not a server admin; "):
        other.request('GET', '/_node/_local/_config', is_of_server=True)
    assert other.user == USER
    other.close()


def test_key_that_is_replaced(app: Celery, server: Server, database: str, keys: Any) -> None:
    """An administrator adds a key, lets the source sign with it, and removes the old one; nothing is restarted."""
    old, new = (uuid.uuid4().bytes * 2 for _ in range(2))
    signers = [Signer('HS256', keys('hmac', base64.b64encode(key).decode()), hs256(key)) for key in (old, new)]
    current[:] = [signers[0].token]
    use(app, server, database, auth='jwt', credentials=f'{__name__}:credentials')
    work(app)
    requests.delete(
        f'{server.url}/_node/_local/_config/jwt_keys/hmac:{signers[0].header["kid"]}', timeout=PATIENCE
    ).raise_for_status()
    with pytest.raises(ServerUnavailable, match=r'Unknown kid; .* the source of the token is asked for a new one'):
        app.backend.client.info()
    current[:] = [signers[1].token]
    work(app)


#: The function that makes the tokens of `credentials`.
current: list[Callable[[], str]] = []


def credentials() -> str:
    """Return the token."""
    return current[0]()


def test_server_that_ignores_tokens(server: Server, database: str, client: Client) -> None:
    info = requests.get(f'{server.url}/_session', timeout=PATIENCE).json().get('info') or {}
    if 'jwt' in info.get('authentication_handlers', ()):
        pytest.skip('the server accepts tokens')
    other = server.client(database, user=None, password=token(), auth='jwt')
    with pytest.raises(AccessDenied, match='does the option authentication_handlers of the server have jwt_authentic'):
        other.info()
    other.close()


# -- a proxy that authenticates


def test_proxy(app: Celery, server: Server, database: str) -> None:
    needs(server, 'proxy')
    config = f'{server.url}/_node/_local/_config/chttpd_auth'
    secret = requests.get(f'{config}/secret', timeout=PATIENCE).json()
    if requests.get(f'{config}/proxy_use_secret', timeout=PATIENCE).json() != 'true':
        pytest.skip('the server does not check the tokens of proxies: [chttpd_auth] proxy_use_secret')
    for algorithm in ('sha1', 'sha256'):
        mark = hmac.new(secret.encode(), USER.encode(), algorithm).hexdigest()
        at = f'{server.host}:{server.port}'
        app.conf.update(
            broker_url=f'couchdb://{USER}:{mark}@{at}/{database}',
            result_backend=f'couchdb://{at}/{database}-results',
            broker_transport_options={**PATIENT_BROKER, 'auth': 'proxy', 'proxy_roles': ['clerk']},
        )
        work(app)
    with app.connection_for_write() as connection:
        session = connection.transport.couchdb.request('GET', '/_session', is_of_server=True)
    assert session['userCtx'] == {'name': USER, 'roles': ['clerk']}
    wrong = server.client(database, user=USER, password='0abc', auth='proxy')
    with pytest.raises(AccessDenied, match=f"the token of user '{USER}': You are not authorized .* the HMAC of"):
        wrong.info()
    wrong.close()


# -- behind a gateway


@pytest.fixture
def gateway(server: Server) -> Iterator[Gateway]:
    with Gateway(server) as gateway:
        yield gateway


@pytest.fixture
def api_key() -> str:
    return f'key-{uuid.uuid4().hex}'


@pytest.fixture
def token_server(api_key: str) -> Iterator[TokenServer]:
    with TokenServer(api_key) as token_server:
        yield token_server


def test_one_token_for_broker_and_results(
    app: Celery, gateway: Gateway, token_server: TokenServer, database: str, api_key: str
) -> None:
    use(app, gateway, database, api_key, auth='iam', token_url=token_server.url)
    work(app)
    assert len(token_server.requests) == 1
    assert set(gateway.seen) == {token_server.given[0]}


def test_revoked_token(app: Celery, gateway: Gateway, token_server: TokenServer, database: str, api_key: str) -> None:
    use(app, gateway, database, api_key, auth='iam', token_url=token_server.url)
    work(app)
    gateway.revoked.update(token_server.given)
    work(app)
    assert len(token_server.requests) == 2
    assert not {*token_server.given} <= gateway.revoked


def test_short_tokens_under_load(
    gateway: Gateway, token_server: TokenServer, server: Server, database: str, client: Client, api_key: str
) -> None:
    """Eight threads write with tokens of three seconds: no write fails, and each token is asked for once."""
    token_server.seconds = 3.0
    address = Address(
        host='127.0.0.1',
        port=gateway.port,
        database=database,
        password=api_key,
        auth='iam',
        token_url=token_server.url,
    )
    writer, failures, stop = Client(address, HTTPOptions(PATIENCE, PATIENCE)), list[Exception](), threading.Event()

    def write() -> None:
        while not stop.is_set():
            try:
                writer.put({'_id': uuid.uuid4().hex})
            except Exception as exc:
                failures.append(exc)
                return

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: failures or len(token_server.given) > 3, 'three renewals')
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        writer.close()
    assert failures == []
    assert len(token_server.requests) == len(token_server.given)
    assert {*gateway.seen} >= {*token_server.given[:-1]}


def test_user_of_a_client_acts_with_its_own_token(gateway: Gateway, app: Celery, database: str) -> None:
    use(app, gateway, database, token(), auth='jwt')
    own = token('ann')
    broker = broker_of(app, Login(None, own, is_token=True))
    assert broker.user == 'ann'
    gateway.seen.clear()
    with producer_as(app, broker) as producer:
        app.send_task('add', (1, 2), producer=producer, ignore_result=True)
    assert set(gateway.seen) == {own}


def test_managed_service(server: Server, database: str, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opaque tokens of half a second, all of them revoked once: the key is exchanged again, and no request fails."""
    monkeypatch.setattr(auth, '_MIN_SECONDS', 0.0)
    with Service(server.url, {}, api_key='a-key', token_seconds=0.5) as service:
        address = Address(port=urlsplit(service.url).port or 0, host='127.0.0.1', database=database)
        address = replace(address, password='a-key', auth='iam', token_url=service.url + TOKENS)
        writer = Client(address, HTTPOptions(PATIENCE, PATIENCE))
        assert service.tokens is not None
        while service.tokens.count < 5:
            writer.put({'_id': uuid.uuid4().hex})
            if service.tokens.count == 3:
                service.tokens.revoke()
        writer.close()


def test_regions(gateway: Gateway) -> None:
    """A region's URL has a token of its own, or uses that of the app."""
    own = token('ann')
    urls = {
        'us': gateway.couchdb_url('us'),
        'eu': f'{gateway.couchdb_url("eu", own)}?login_method=jwt;couchdb://127.0.0.1:1/eu',
        'pt': 'couchdb://me:secret@127.0.0.1:1/pt',
    }
    given = {'region': 'us', 'regions': urls, 'auth': 'jwt', 'credentials': f'{__name__}:credentials'}
    current[:] = [token]
    found = addresses(Options.of(given))
    assert {name: (node.auth, node.password, node.credentials) for name, node in found.items()} == {
        'us': ('jwt', None, given['credentials']),
        'eu': ('jwt', own, None),
        'pt': ('basic', 'secret', None),
    }
    assert [CouchServer.of(found[name]).node.auth.user for name in urls] == ['bob', 'ann', 'me']
    assert own not in repr(Options.of(given)) + repr(found)


def test_page(gateway: Gateway, app: Celery, database: str) -> None:
    """Users of the page log in with a token of their own, until it ends."""
    pytest.importorskip('starlette')
    from celery_couchdb.web import create_app
    from tests.web import Browser, served

    use(app, gateway, database, token(), auth='jwt')
    work(app)
    with served(create_app(app)) as url:
        browser = Browser(url)
        page = browser.get('/login').text
        assert ('Token' in page, 'CouchDB user' in page) == (True, False)
        for wrong in (token(seconds=-10), 'two words'):
            browser.post('/login', password=wrong)
            assert (browser.page.status_code, wrong in browser.page.text) == (403, False)
        assert 'the token must consist of printable ASCII characters' in browser.text
        given = token(seconds=4)
        assert browser.post('/login', password=given).url.endswith('/queues')
        wait_for(lambda: browser.get('/queues').url.endswith('/login?next=%2Fqueues'), 'the session to end')
        metrics = f'{url}/metrics'
        assert requests.get(metrics, timeout=PATIENCE).headers['WWW-Authenticate'].startswith('Bearer')
        for given, status in ((token(), 200), (token(seconds=-10), 401)):
            answer = requests.get(metrics, headers={'Authorization': f'Bearer {given}'}, timeout=PATIENCE)
            assert (answer.status_code, given in answer.text) == (status, False)
