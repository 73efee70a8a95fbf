"""Where a database is and how to enter (`kombu_couchdb.couchdb.address`)."""

from __future__ import annotations

import ssl
import traceback
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


def test_nothing_said_is_the_local_server() -> None:
    assert (
        of() == Address() == Address(host='localhost', port=5984, database='celery', user=None, tls=False, verify=True)
    )
    assert of().url == 'http://localhost:5984/celery'


def test_couchdbs_is_tls_on_its_own_port_with_verified_certificates() -> None:
    address = of(scheme='couchdbs', host='db.example')
    assert address.server == 'https://db.example:6984'
    assert address.verify is True


@pytest.mark.parametrize('scheme', ['couchdb', 'couchdbs'])
def test_a_port_that_is_given_is_used(scheme: str) -> None:
    assert of(scheme=scheme, port=1234).server.endswith('://localhost:1234')


@pytest.mark.parametrize(
    ('given', 'name'),
    [('jobs', 'jobs'), ('/jobs', 'jobs'), ('/', 'celery'), ('', 'celery'), (None, 'celery'), ('a/b', 'a/b')],
)
def test_the_path_names_the_database(given: str | None, name: str) -> None:
    assert of(database=given).database == name


def test_the_default_database_is_the_callers() -> None:
    assert of(default_database='celery_results').database == 'celery_results'


@pytest.mark.parametrize(
    ('name', 'quoted'), [('a/b', 'a%2Fb'), ('a+b', 'a%2Bb'), ('a$b(c)', 'a%24b%28c%29'), ('a-b_1', 'a-b_1')]
)
def test_the_name_is_quoted_in_the_url(name: str, quoted: str) -> None:
    assert of(database=name).url == f'http://localhost:5984/{quoted}'


@pytest.mark.parametrize('host', ['::1', 'fe80::1', '2001:db8::2'])
def test_ipv6_addresses_stand_in_brackets(host: str) -> None:
    assert of(host=host).server == f'http://[{host}]:5984'


@pytest.mark.parametrize('name', ['Celery', '1st', '_users', 'a b', 'a.b', 'a?b', 'ä', 'a\n', '-a', 'a#b', 'a%2Fb'])
def test_what_couchdb_takes_for_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match='is not a CouchDB database name') as caught:
        of(database=name)
    assert repr(name) in str(caught.value)


# -- user and password


def test_a_password_may_be_a_function_that_is_asked_later() -> None:
    password = lambda: pytest.fail('asked')  # noqa: E731
    assert of(user='me', password=password).password is password


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
def test_what_may_change_is_sent_for_a_session_unless_something_else_is_said(parts: dict[str, Any], auth: str) -> None:
    assert of(**parts).auth == auth


@pytest.mark.parametrize('given', [{'user': 'me', 'password': SECRET}, {'user': 'me'}, {'password': SECRET}])
def test_credentials_are_given_once(given: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match='given twice') as caught:
        of(**given, credentials='environment')
    assert SECRET not in str(caught.value)


def test_no_user_is_none() -> None:
    assert of(user='').user is None


def test_the_password_is_not_shown() -> None:
    address = of(user='me', password=SECRET, scheme='couchdbs')
    assert address.password == SECRET
    assert 'me' in repr(address)
    for text in (repr(address), str(address), address.url, address.server, f'{address}'):
        assert SECRET not in text


def test_an_unquoted_password_is_not_told() -> None:
    # couchdb://me:12/tell-nobody@host/db: kombu takes what follows the slash for the database.
    with pytest.raises(ConfigurationError, match='percent-encode') as caught:
        of(user=None, database=f'{SECRET}@host/db')
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize('wrong', [{'database': 'Wrong'}, {'tls': {'wrong': 1}}, {'database': 'a@b'}])
def test_no_error_has_the_password(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        of(user='me', password=SECRET, **wrong)
    assert SECRET not in ''.join(traceback.format_exception(caught.value))


# -- TLS


@pytest.mark.parametrize('tls', [True, 'true', 'True', '1', {'ca_certs': 'ca.pem'}])
def test_tls_may_be_asked_for_without_the_scheme(tls: Any) -> None:
    assert of(tls=tls).server == 'https://localhost:6984'


@pytest.mark.parametrize('tls', [None, False, 'false', '0', '', {}])
def test_without_tls_it_is_http(tls: Any) -> None:
    assert of(tls=tls).server == 'http://localhost:5984'


@pytest.mark.parametrize('tls', [None, False, {}])
def test_couchdbs_stays_tls_whatever_else_is_said(tls: Any) -> None:
    assert of(scheme='couchdbs', tls=tls).tls is True


@pytest.mark.parametrize('prefix', ['', 'ssl_'])
def test_certificates_are_known_with_and_without_prefix(prefix: str) -> None:
    given = {'ca_certs': 'ca.pem', 'certfile': 'me.pem', 'keyfile': 'me.key', 'cert_reqs': ssl.CERT_REQUIRED}
    address = of(tls={prefix + name: value for name, value in given.items()})
    assert (address.verify, address.cert) == ('ca.pem', ('me.pem', 'me.key'))


def test_a_certificate_may_hold_its_key() -> None:
    assert of(tls={'certfile': 'both.pem'}).cert == 'both.pem'


@pytest.mark.parametrize('name', ['cert_reqs', 'ssl_cert_reqs'])
def test_verification_is_off_only_if_asked_for(name: str) -> None:
    assert of(tls={name: ssl.CERT_NONE}).verify is False
    for other in (ssl.CERT_REQUIRED, ssl.CERT_OPTIONAL):
        assert of(tls={name: other}).verify is True
    assert of(tls={'certfile': 'me.pem'}).verify is True


@pytest.mark.parametrize('name', ['check_hostname', 'ssl_version', 'cacerts', 'CA_CERTS'])
def test_an_unknown_tls_option_is_named(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f'unknown TLS option {name.removeprefix("ssl_")!r}'):
        of(tls={'ca_certs': 'ca.pem', name: True})
