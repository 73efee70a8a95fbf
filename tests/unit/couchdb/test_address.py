"""The address of a database (`kombu_couchdb.couchdb.address`)."""

from __future__ import annotations

import ssl
from typing import Any

import pytest

from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.errors import ConfigurationError

SECRET = 'tell-nobody'


def of(**parts: Any) -> Address:
    return Address.of(
        **{
            'scheme': 'couchdb',
            'host': None,
            'port': None,
            'database': None,
            'default_database': 'celery',
            'user': None,
            'password': None,
            **parts,
        }
    )


# -- server and database


def test_the_default_is_the_local_server() -> None:
    assert (
        of() == Address() == Address(host='localhost', port=5984, database='celery', user=None, tls=False, verify=True)
    )
    assert of().url == 'http://localhost:5984/celery'
    encrypted = of(scheme='couchdbs', host='db.example')
    assert (encrypted.server, encrypted.verify) == ('https://db.example:6984', True)


def test_ipv6_addresses_are_written_in_brackets() -> None:
    assert of(host='2001:db8::2').server == 'http://[2001:db8::2]:5984'


@pytest.mark.parametrize('name', ['Celery', '1st', '_users', 'a b', 'a.b', 'a?b', 'ä', 'a\n', '-a', 'a#b', 'a%2Fb'])
def test_names_that_couchdb_refuses_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match='is not a CouchDB database name') as caught:
        of(database=name)
    assert repr(name) in str(caught.value)


# -- user and password


@pytest.mark.parametrize(
    ('parts', 'auth'),
    [
        ({'user': 'me', 'password': SECRET}, 'basic'),
        ({'credentials': 'environment'}, 'cookie'),
        ({'password': lambda: SECRET}, 'cookie'),
        ({'user': 'me', 'auth': 'cookie'}, 'cookie'),
        ({'credentials': 'environment', 'auth': 'basic'}, 'basic'),
    ],
)
def test_changeable_passwords_use_sessions_by_default(parts: dict[str, Any], auth: str) -> None:
    assert of(**parts).auth == auth


@pytest.mark.parametrize('given', [{'user': 'me', 'password': SECRET}, {'user': 'me'}, {'password': SECRET}])
def test_credentials_beside_user_or_password_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match='given twice') as caught:
        of(**given, credentials='environment')
    assert SECRET not in str(caught.value)


# -- TLS


def test_settings_can_turn_tls_on_and_not_off() -> None:
    for on in (True, 'true', 'True', '1', {'ca_certs': 'ca.pem'}):
        assert of(tls=on).server == 'https://localhost:6984'
    without: list[Any] = [None, False, 'false', '0', '', {}]
    for off in without:
        assert of(tls=off).server == 'http://localhost:5984'
        assert of(scheme='couchdbs', tls=off).tls is True


@pytest.mark.parametrize('prefix', ['', 'ssl_'])
def test_tls_options_with_and_without_prefix(prefix: str) -> None:
    given = {'ca_certs': 'ca.pem', 'certfile': 'me.pem', 'keyfile': 'me.key', 'cert_reqs': ssl.CERT_REQUIRED}
    address = of(tls={prefix + name: value for name, value in given.items()})
    assert (address.verify, address.cert) == ('ca.pem', ('me.pem', 'me.key'))


@pytest.mark.parametrize('name', ['cert_reqs', 'ssl_cert_reqs'])
def test_only_cert_none_turns_verification_off(name: str) -> None:
    assert of(tls={name: ssl.CERT_NONE}).verify is False
    for other in (ssl.CERT_REQUIRED, ssl.CERT_OPTIONAL):
        assert of(tls={name: other}).verify is True
    assert of(tls={'certfile': 'me.pem'}).verify is True


@pytest.mark.parametrize('name', ['check_hostname', 'ssl_version', 'cacerts', 'CA_CERTS'])
def test_an_unknown_tls_option_is_named(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f'unknown TLS option {name.removeprefix("ssl_")!r}'):
        of(tls={'ca_certs': 'ca.pem', name: True})


def test_a_key_needs_its_certificate() -> None:
    with pytest.raises(ConfigurationError, match='keyfile needs the option certfile'):
        of(tls={'keyfile': 'me.key'})
