"""`result_backend_transport_options` (`celery_couchdb.options`), and what results take from the broker's settings."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
from celery import Celery

from celery_couchdb.options import ResultOptions
from kombu_couchdb.errors import ConfigurationError


def backend_of(**options: Any) -> Any:
    app = Celery('test', set_as_current=False, broker='memory://', backend='couchdb://user:secret@host/db')
    app.conf.result_backend_transport_options = options
    return app.backend


def test_retry_policy_is_completed_with_defaults() -> None:
    assert dict(ResultOptions.of({'retry_policy': {'max_retries': 3}}).retry_policy) == {
        'max_retries': 3,
        'interval_start': 0,
        'interval_step': 1,
        'interval_max': 1,
    }


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        ('visibility_timeout', 1),
        ('sweep_intervall', 1),
        ('request_timeout', '5'),
        ('sweep_interval', -1),
        ('result_chord_ordered', 1),
        ('retry_policy', {'tries': 1}),
        ('retry_policy', 5),
        ('global_keyprefix', '_mine'),
    ],
)
def test_wrong_options_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=name) as caught:
        backend_of(**{name: value})
    assert 'secret' not in str(caught.value)


def test_error_about_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="unknown transport option 'socket_timeout'") as caught:
        backend_of(socket_timeout=1)
    for name in (*(f.name for f in fields(ResultOptions)), 'retry_policy', 'global_keyprefix'):
        assert re.search(rf'known are: .*\b{name}\b', str(caught.value))


def test_error_names_the_setting_and_all_that_is_wrong_in_it() -> None:
    policy = {'timeout': 5.0, 'max_retry': 3, 'interval_step': -1}
    with pytest.raises(ConfigurationError) as caught:
        backend_of(retry_policy=policy, sweep_intervall=1)
    for part in (
        'result_backend_transport_options: transport option retry_policy: ',
        "unknown transport option 'sweep_intervall' (did you mean sweep_interval?)",
        "retry_policy: unknown members 'max_retry' (did you mean max_retries?), 'timeout'; known are: ",
        'retry_policy: interval_step must be a number from 0 on, not -1',
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    'conf',
    [
        {'result_backend': 'couchdb://host/db', 'redis_socket_timeout': 'hidden', 'redis_password': 'hidden'},
        {
            'CELERY_RESULT_BACKEND': 'couchdb://host/db',
            'CELERY_REDIS_SOCKET_TIMEOUT': 'hidden',
            'CELERY_REDIS_PASSWORD': 'hidden',
        },
    ],
)
def test_settings_for_results_in_redis_are_refused_by_name(conf: dict[str, Any]) -> None:
    app = Celery('test', set_as_current=False)
    app.config_from_object(conf)
    with pytest.raises(
        ConfigurationError, match=r'^redis_password, redis_socket_timeout: settings for results in Redis have no effect'
    ) as caught:
        _ = app.backend
    assert 'hidden' not in str(caught.value)


def test_defaults_of_settings_for_redis_are_no_settings() -> None:
    app = Celery('test', set_as_current=False, broker='memory://', backend='couchdb://host/db')
    app.conf.redis_socket_timeout = app.conf.redis_socket_timeout
    assert app.backend.options == ResultOptions()


# -- what the broker's settings say, if it is CouchDB


def inherited(url: str, broker: str, conf: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return a backend whose broker has `options`."""
    app = Celery('test', set_as_current=False, broker=broker, backend=url)
    app.conf.update({'broker_transport_options': options, **(conf or {})})
    return app.backend


def test_results_take_options_of_the_broker() -> None:
    backend = inherited(
        'couchdb://u:p@a/r', 'couchdb://x:y@b', auth='cookie', request_timeout=5.0, connect_timeout=2.0, keep_done=9.0
    )
    assert (backend.options.request_timeout, backend.options.connect_timeout) == (5.0, 2.0)
    assert (backend.client.address.auth, backend.client.address.user) == ('cookie', 'u')


def test_wrong_option_of_the_broker_is_named_as_one_of_the_broker() -> None:
    with pytest.raises(
        ConfigurationError, match=r'^broker_transport_options: transport option request_timeout must be'
    ):
        inherited('couchdb://a/r', 'couchdb://b', request_timeout='5')


def test_own_options_take_precedence() -> None:
    own = {'result_backend_transport_options': {'auth': 'basic', 'request_timeout': 7.0}}
    backend = inherited('couchdb://a/r', 'couchdb://u:p@a', own, auth='cookie', request_timeout=5.0)
    assert (backend.options.request_timeout, backend.client.address.auth) == (7.0, 'basic')


def test_options_of_another_broker_are_left_alone() -> None:
    backend = inherited('couchdb://a/r', 'redis://u:p@a', {'broker_use_ssl': {'ssl_cert_reqs': 0}}, request_timeout=5.0)
    assert (backend.options.request_timeout, backend.client.address.tls) == (8.0, False)
    assert backend.client.address.user is None


@pytest.mark.parametrize(
    ('url', 'broker', 'found'),
    [
        ('couchdb://a/r', 'couchdb://u:p@a/b', ('u', 'p')),
        ('couchdb://a:5984/r', 'couchdb://u:p@z;couchdb://v:q@a', ('v', 'q')),
        ('couchdb://w:o@a/r', 'couchdb://u:p@a', ('w', 'o')),
        ('couchdb://a/r', 'couchdb://u:p@z', (None, None)),
        ('couchdb://a:6000/r', 'couchdb://u:p@a', (None, None)),
        ('couchdbs://a:5984/r', 'couchdb://u:p@a', (None, None)),
    ],
)
def test_password_of_the_broker_is_used_for_its_own_server_only(
    url: str, broker: str, found: tuple[str | None, str | None]
) -> None:
    address = inherited(url, broker).client.address
    assert (address.user, address.password) == found


@pytest.mark.parametrize('url', ['couchdb://a/r', 'couchdb://u:p@a/r', 'couchdb://z/r'])
def test_credentials_of_the_broker_are_used_for_its_own_server_only(url: str) -> None:
    address = inherited(url, 'couchdb://a', credentials='environment').client.address
    assert (address.credentials, address.auth) == (
        ('environment', 'cookie') if url == 'couchdb://a/r' else (None, 'basic')
    )


def test_tls_of_the_broker() -> None:
    tls = {'broker_use_ssl': {'ca_certs': '/ca.pem'}}
    for url, broker in (('couchdb://a/r', 'couchdb://b'), ('couchdbs://a/r', 'couchdbs://b')):
        address = inherited(url, broker, tls).client.address
        assert (address.server, address.verify) == ('https://a:6984', '/ca.pem')
    assert inherited('couchdb://a/r?ssl=false', 'couchdb://b', tls).client.address.server == 'http://a:5984'
    in_the_url = inherited('couchdbs://a/r', 'couchdbs://a/b?ssl_ca_certs=/ca.pem').client.address
    assert in_the_url.verify == '/ca.pem'
    own = inherited('couchdbs://a/r?ssl_ca_certs=/own.pem', 'couchdbs://a/b?ssl_ca_certs=/ca.pem').client.address
    assert own.verify == '/own.pem'


def test_wrong_url_of_the_broker_is_named() -> None:
    with pytest.raises(ConfigurationError, match='broker_url: the URL cannot be read') as caught:
        inherited('couchdb://a/r', 'couchdb://u:se/cret@[a')
    assert 'cret' not in str(caught.value)
