"""URLs and options with any text: they are valid, or refused with one clear sentence without the password."""

from __future__ import annotations

import traceback
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu import Connection

from celery_couchdb.options import ResultOptions as ResultOptions
from celery_couchdb.results.result_store import address_of
from kombu_couchdb.errors import ConfigurationError, CouchDBError
from kombu_couchdb.options import Options

from .strategies import any_text, json_values

SECRET = 'tell-nobody-77'

hosts = (
    st.sampled_from(
        ['localhost', '127.0.0.1', '[::1]', '[::1', '::1', '', 'a..b', '-', 'h' * 300, 'ü.example', 'a b', '%zz']
    )
    | any_text()
)
ports = st.sampled_from(
    ['', ':', ':0', ':5984', ':65535', ':65536', ':-1', ':99999999', ':x', ':5984x', ':٥']
) | any_text().map(':'.__add__)
databases = st.sampled_from(['', '/', '/db', '/a/b', '/Upper', '/_users', '/%2F', '/a%zz', '//']) | any_text().map(
    '/'.__add__
)
queries = st.sampled_from(
    ['', '?', '?x=1', '?ssl_ca_certs=/x', '?ssl=true', '?ssl_cert_reqs=none', '?ssl_keyfile=k', '?a=&b', '?=']
) | any_text().map('?'.__add__)
schemes = st.sampled_from(['couchdb://', 'couchdbs://', 'couchdb:', 'couchdb:/', 'COUCHDB://', 'http://'])
secrets = (
    st.sampled_from(['', '/', '#', '?', '@', ':', '%', '%zz', ' ', '\n', 'ü', '[', ']', ';', '\ud800', '\0'])
    | any_text()
)


def told(exc: BaseException) -> str:
    """Return the complete traceback of an error, as in a log."""
    return ''.join(traceback.format_exception(exc))


def is_clear(exc: CouchDBError) -> None:
    assert isinstance(exc, ConfigurationError)
    assert SECRET not in str(exc)
    assert SECRET not in told(exc)
    assert 20 < len(str(exc)) < 500
    assert str(exc).isprintable()


@given(secrets, secrets, st.booleans())
def test_user_and_password_of_any_characters(user: str, more: str, tls: bool) -> None:
    try:
        url = f'couchdb{"s" if tls else ""}://{quote("u" + user, safe="")}:{quote(SECRET + more, safe="")}@host:1234/db'
    except UnicodeEncodeError:
        return  # the text cannot be part of a URL
    address = address_of(url)
    assert (address.user, address.password) == ('u' + user, SECRET + more)
    assert (address.host, address.port, address.database, address.tls) == ('host', 1234, 'db', tls)
    with Connection(url) as connection:
        assert (connection.transport.address.user, connection.transport.address.password) == ('u' + user, SECRET + more)
    assert SECRET not in repr(address) + str(address) + address.url


#: The two functions that parse URLs, each with the name of its setting.
WAYS: list[tuple[str, Any]] = [
    ('broker_url', lambda url: Connection(url).transport.address),
    ('result_backend', address_of),
]


@given(schemes, secrets, hosts, ports, databases, queries)
def test_any_url_is_valid_or_refused(scheme: str, more: str, host: str, port: str, database: str, query: str) -> None:
    rest = f'me:{SECRET}{more}@{host}{port}{database}{query}'
    for (_, read), url in zip(WAYS, ('couchdb://' + rest, scheme + rest), strict=True):
        try:
            address = read(url)
        except CouchDBError as exc:
            is_clear(exc)
        else:
            assert SECRET not in repr(address) + address.url


@pytest.mark.parametrize(('setting', 'read'), WAYS, ids=['broker', 'results'])
@pytest.mark.parametrize('place', ['', 'couchdb://a:1/db;'], ids=['first', 'second'])
def test_unquoted_password_is_one_sentence(place: str, setting: str, read: Any) -> None:
    for char in ('/', '#', '?', '[', ']', '\uff0f', '[x]', '12/', '12?', '12#'):
        for password in (f'{SECRET}{char}', f'{char}{SECRET}', f'{SECRET}{char}{SECRET}'):
            with pytest.raises(
                ConfigurationError, match=r'the URL cannot be read; write .* and password percent-encoded'
            ) as caught:
                read(f'{place}couchdb://me:{password}@host/db')
            is_clear(caught.value)
            assert caught.value.__context__ is None
    for password in (f'12;{SECRET}', f'{SECRET};{SECRET}', f'12;{SECRET}://{SECRET}'):
        with pytest.raises(ConfigurationError) as caught:
            read(f'{place}couchdb://me:{password}@host/db')
        is_clear(caught.value)
    for char in (':', '@', '%', '&', '=', '+', '%zz'):  # these need no quoting
        assert read(f'couchdb://me:{SECRET}{char}{SECRET}@host/db').password == f'{SECRET}{char}{SECRET}'


TLS = 'some of the URLs ask for TLS and some do not; write couchdbs://'
SCHEME = 'unknown scheme; write couchdb://, or couchdbs:// for TLS'
UNKNOWN = (
    "unknown parameter '{} in the URL; known are ssl, .*login_method; options belong in "
    'broker_transport_options or result_backend_transport_options$'
)


@pytest.mark.parametrize(('setting', 'read'), WAYS, ids=['broker', 'results'])
@pytest.mark.parametrize(
    ('url', 'text'),
    [
        (f'couchdb://me:{SECRET}@host/db?timeout=3', UNKNOWN.format("timeout'")),
        (f'couchdb://me:{SECRET}@host/db?password=3', UNKNOWN.format("password'")),
        (f'couchdb://me:{SECRET}@host/db?{"x" * 500}=3', UNKNOWN.format('xxx.*')),
        ('couchdb://host/db?ssl=yes', 'the parameter ssl in the URL must be one of true, false'),
        ('couchdb://host/db?ssl_cert_reqs=maybe', 'the parameter ssl_cert_reqs in the URL must be one of required, '),
        ('couchdb://host/db?ssl=true&ssl_ca_certs=x', 'leave ssl out'),
        (f'http://me:{SECRET}/@host:x/db?y=1', '^{}: write couchdb:// instead of http:// '),
        (f'https://me:{SECRET}/@host:x/db?y=1', '^{}: write couchdbs:// instead of https:// '),
        ('couchdbs://a;couchdb://b', '^{}: ' + TLS),
        ('couchdb://a;couchdbs://b', '^{}: ' + TLS),
        ('couchdbs://a?ssl=false;couchdb://b?ssl=false', '^{}: ' + TLS),
        ('couchdb://a;redis://b', '^{}: ' + SCHEME),
        ('couchdb://a;b', '^{}: ' + SCHEME),
    ],
)
def test_wrong_url_is_one_sentence_that_says_what_to_write(url: str, text: str, setting: str, read: Any) -> None:
    with pytest.raises(ConfigurationError, match=text.replace('{}', setting)) as caught:
        read(url)
    is_clear(caught.value)


@pytest.mark.parametrize(('setting', 'read'), WAYS, ids=['broker', 'results'])
@pytest.mark.parametrize('query', ['ssl=false', 'ssl=0', 'ssl_cert_reqs=none', 'ssl='])
def test_couchdbs_always_uses_tls(query: str, setting: str, read: Any) -> None:
    try:
        address = read(f'couchdbs://a:1?{query};couchdbs://b:1?{query}')
    except ConfigurationError:
        assert query == 'ssl='
    else:
        assert [address.server, address.others[0].server] == ['https://a:1', 'https://b:1']
        assert address.verify is ('none' not in query)


@pytest.mark.parametrize(('query', 'port'), [('', 1), ('?ssl=false', 2), ('?ssl_ca_certs=x', 3)])
def test_failover_keeps_tls(query: str, port: int) -> None:
    with Connection(f'couchdbs://a:{port}{query};couchdbs://b:{port}{query}') as connection:
        connection.transport.couchdb.switch_node()
        connection.transport.name_node()
        with connection.clone() as clone:
            assert clone.transport.address.server == f'https://b:{port}'


@pytest.mark.parametrize(
    'url', ['couchdb://a..b', 'couchdb://' + 'h' * 300, 'couchdb://-:1', 'couchdb://a b', 'couchdb://%zz']
)
def test_impossible_host_is_one_error(url: str) -> None:
    with pytest.raises(CouchDBError) as caught, Connection(url.replace('://', f'://me:{SECRET}@')) as connection:
        connection.connect()
    assert SECRET not in told(caught.value)


#: The other types of options that are None by default.
_OTHER_TYPES = {'credentials': (str,), 'auth': (str,), 'global_keyprefix': (str,)}


@pytest.mark.parametrize('options', [Options, ResultOptions])
def test_option_of_any_value_is_valid_or_refused(options: Any) -> None:
    names = (
        st.sampled_from([*Options.__dataclass_fields__, *ResultOptions.__dataclass_fields__, 'global_keyprefix', 'x'])
        | any_text()
    )

    @given(st.dictionaries(names, json_values(), max_size=3))
    def each(given_: dict[str, Any]) -> None:
        try:
            found = options.of(given_)
        except CouchDBError as exc:
            is_clear(exc)
        else:
            for name in found.__dataclass_fields__:
                assert type(getattr(found, name)) in (type(getattr(options(), name)), *_OTHER_TYPES.get(name, ())), name

    each()


@given(
    st.dictionaries(
        st.sampled_from(['max_retries', 'interval_start', 'interval_step', 'interval_max']), json_values(), min_size=1
    )
)
def test_retry_policy_must_consist_of_numbers(policy: dict[str, Any]) -> None:
    try:
        found = ResultOptions.of({'retry_policy': policy}).retry_policy
    except CouchDBError as exc:
        is_clear(exc)
    else:
        assert all(value is None or 0 <= value < float('inf') for value in found.values())
