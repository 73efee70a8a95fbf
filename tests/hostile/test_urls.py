"""URLs and options of any text: understood, or refused in one clear sentence; the password is never in it."""

from __future__ import annotations

import traceback
from typing import Any
from urllib.parse import quote

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st
from kombu import Connection

from celery_couchdb.address import address_of
from celery_couchdb.options import Options as ResultOptions
from kombu_couchdb.address import Address
from kombu_couchdb.client import Client
from kombu_couchdb.errors import ConfigurationError, CouchDBError
from kombu_couchdb.options import Options

from .strategies import any_text, json_values

SECRET = 'tell-nobody-77'

hosts = st.sampled_from(['localhost', '127.0.0.1', '[::1]', '[::1', '::1', '', 'a..b', '-', 'h' * 300, 'ü.example', 'a b',
    '%zz']) | any_text()
ports = st.sampled_from(['', ':', ':0', ':5984', ':65535', ':65536', ':-1', ':99999999', ':x', ':5984x',
    ':٥']) | any_text().map(':'.__add__)
databases = st.sampled_from(['', '/', '/db', '/a/b', '/Upper', '/_users', '/%2F', '/a%zz', '//']) | any_text().map('/'.__add__)
queries = st.sampled_from(['', '?', '?x=1', '?ssl_ca_certs=/x', '?ssl=true', '?ssl_cert_reqs=none', '?ssl_keyfile=k',
    '?a=&b', '?=']) \
    | any_text().map('?'.__add__)
schemes = st.sampled_from(['couchdb://', 'couchdbs://', 'couchdb:', 'couchdb:/', 'COUCHDB://', 'http://'])
secrets = st.sampled_from(['', '/', '#', '?', '@', ':', '%', '%zz', ' ', '\n', 'ü', '[', ']', ';', '\ud800', '\0']) | any_text()


def told(exc: BaseException) -> str:
    """Return all that a log has of an error."""
    return ''.join(traceback.format_exception(exc))


def is_clear(exc: CouchDBError) -> None:
    assert isinstance(exc, ConfigurationError)
    assert SECRET not in str(exc)
    assert SECRET not in told(exc)
    assert 20 < len(str(exc)) < 500
    assert str(exc).isprintable()


@given(secrets, secrets, st.booleans())
def test_user_and_password_of_any_characters_come_through(user: str, more: str, tls: bool) -> None:
    try:
        url = f'couchdb{"s" if tls else ""}://{quote("u" + user, safe="")}:{quote(SECRET + more, safe="")}@host:1234/db'
    except UnicodeEncodeError:
        return  # it cannot be written as a URL
    address = address_of(url)
    assert (address.user, address.password) == ('u' + user, SECRET + more)
    assert (address.host, address.port, address.database, address.tls) == ('host', 1234, 'db', tls)
    with Connection(url) as connection:
        assert (connection.transport.address.user, connection.transport.address.password) == ('u' + user, SECRET + more)
    assert SECRET not in repr(address) + str(address) + address.url


@given(schemes, secrets, hosts, ports, databases, queries)
def test_a_url_of_results_is_understood_or_refused(scheme: str, more: str, host: str, port: str, database: str,
    query: str) -> None:
    try:
        address = address_of(f'{scheme}me:{SECRET}{more}@{host}{port}{database}{query}')
    except CouchDBError as exc:
        is_clear(exc)
    else:
        assert SECRET not in repr(address) + address.url


@given(secrets, hosts, ports, databases, queries)
def test_a_url_of_the_broker_is_understood_or_refused(more: str, host: str, port: str, database: str, query: str) -> None:
    url = f'couchdb://me:{SECRET}{more}@{host}{port}{database}{query}'
    try:
        connection = Connection(url)
    except Exception:
        return  # kombu parses it, and says so in its own words
    with connection:
        try:
            address = connection.transport.address
        except CouchDBError as exc:
            is_clear(exc)
        else:
            assert SECRET not in repr(address) + address.url


@given(st.fixed_dictionaries({}, optional={
    'host': any_text() | st.none(), 'port': st.integers() | st.none(), 'database': any_text() | st.none(),
    'user': any_text() | st.none(),
    'tls': json_values(exact=False)}))
def test_any_parts_make_an_address_or_an_error(parts: dict[str, Any]) -> None:
    try:
        address = Address.of(**{'scheme': 'couchdb', 'host': None, 'port': None, 'database': None, 'user': None, **parts},
                             password=SECRET, default_database='celery')
    except CouchDBError as exc:
        is_clear(exc)
    else:
        Client(address).close()
        assert SECRET not in repr(address) + address.url


@pytest.mark.parametrize('url', ['couchdb://a..b', 'couchdb://' + 'h' * 300, 'couchdb://-:1', 'couchdb://a b', 'couchdb://%zz'])
def test_a_host_that_cannot_be_is_one_error_of_ours(url: str) -> None:
    with pytest.raises(CouchDBError) as caught, Connection(url.replace('://', f'://me:{SECRET}@')) as connection:
        connection.connect()
    assert SECRET not in told(caught.value)


@pytest.mark.parametrize('options', [Options, ResultOptions])
def test_options_of_any_value_are_taken_or_refused(options: Any) -> None:
    names = st.sampled_from([*Options.__dataclass_fields__, *ResultOptions.__dataclass_fields__, 'global_keyprefix',
        'x']) | any_text()

    @given(st.dictionaries(names, json_values(), max_size=3))
    def each(given_: dict[str, Any]) -> None:
        try:
            found = options.of(given_)
        except CouchDBError as exc:
            is_clear(exc)
        else:
            for name in found.__dataclass_fields__:
                assert type(getattr(found, name)) is type(getattr(options(), name)), name

    each()


@given(st.dictionaries(st.sampled_from(['max_retries', 'interval_start', 'interval_step', 'interval_max']), json_values(),
    min_size=1))
def test_a_retry_policy_is_of_numbers(policy: dict[str, Any]) -> None:
    try:
        found = ResultOptions.of({'retry_policy': policy}).retry_policy
    except CouchDBError as exc:
        is_clear(exc)
    else:
        assert all(value is None or 0 <= value < float('inf') for value in found.values())


def test_the_url_of_an_app_is_not_told() -> None:
    app = Celery('app', set_as_current=False, backend=f'couchdb://me:{SECRET}/@host/db')
    with pytest.raises(ConfigurationError) as caught:
        app.backend  # noqa: B018
    is_clear(caught.value)
