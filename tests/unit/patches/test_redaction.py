"""Masked passwords in URLs that kombu and Celery show (`couchdb.address`, `celery_couchdb.patches.output`)."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.bin.graph import graph
from click.testing import CliRunner
from kombu import Connection

from celery_couchdb.patches import output
from kombu_couchdb.couchdb.address import redacted

output.install()

SECRET, OTHER = 'tell-nobody', 'nor-this-one'
ONE = f'couchdb://me:{SECRET}@a:1/db'
LIST = f'{ONE};couchdbs://you:{OTHER}@b/db?ssl_ca_certs=x'
SAME = f'{ONE};couchdb://you:{OTHER}@b:2/db'


@pytest.mark.parametrize(
    ('url', 'shown'),
    [
        ('', ''),
        ('couchdb://me@a/db', 'couchdb://me@a/db'),
        (LIST, 'couchdb://me:**@a:1/db;couchdbs://you:**@b/db?ssl_ca_certs=x'),
        (f'couchdb://:{SECRET}@a', 'couchdb://:**@a'),
        (f'COUCHDB://me:{SECRET}@a', 'COUCHDB://me:**@a'),
        (f'couchdb://a:1/db;redis://:{SECRET}@b;{ONE}', 'couchdb://a:1/db;redis://:**@b;couchdb://me:**@a:1/db'),
    ],
)
def test_passwords_are_masked_in_each_url_of_a_list(url: str, shown: str) -> None:
    assert redacted(url) == shown


@pytest.mark.parametrize('char', list('/#@:;\n'))
def test_unquoted_password_is_masked_completely(char: str) -> None:
    password = f'{SECRET}{char}{OTHER}{char}'
    assert redacted(f'couchdb://me:{password}@a;couchdb://me:{password}@b') == 'couchdb://me:**@a;couchdb://me:**@b'


class Django:
    """Settings in the style of Django."""

    CELERY_BROKER_URL = SAME
    CELERY_BROKER_READ_URL = SAME
    CELERY_RESULT_BACKEND = SAME


@dataclass(frozen=True)
class Node:
    """An object that shows a URL."""

    url: str


def app_of(settings: Any, **how: Any) -> Celery:
    app = Celery('app', set_as_current=False)
    app.config_from_object(settings, **how)
    return app


@pytest.mark.parametrize(
    'app',
    [
        app_of(Django, namespace='CELERY'),
        app_of({'broker_url': SAME, 'result_backend': SAME, 'broker_read_url': SAME, 'broker_write_url': ONE}),
        app_of({'broker_url': SAME.split(';'), 'result_backend': ONE, 'broker_read_url': SAME.split(';')}),
        app_of({'BROKER_URL': SAME, 'CELERY_RESULT_BACKEND': SAME}),
        app_of({'broker_url': ONE, 'nodes': [[ONE], ({SAME: [SAME.encode()]}, {SAME})], 'others': {'a': [[SAME]]}}),
        app_of({'broker_url': ONE, 'nodes': [Node(SAME)], 'node': Node(ONE), 'by_node': {Node(ONE): 1}}),
        app_of({'broker_url': f'couchdb://me:{SECRET}/@a/db', 'result_backend': f'couchdb://me:{SECRET}#@a/db'}),
    ],
    ids=['Django', 'lower case', 'lists', 'old names', 'nested lists', 'objects', 'not quoted'],
)
def test_settings_are_shown_without_passwords(app: Celery) -> None:
    table = app.conf.table(with_defaults=True)
    shown = [
        app.conf.humanize(with_defaults=True),
        app.conf.humanize(),
        app.bugreport(),
        json.dumps(table, default=str),
    ]
    for text in shown:
        assert SECRET not in text
        assert OTHER not in text
        assert '@a' in text
    assert len(table) > 100


def test_other_settings_are_shown_as_by_celery() -> None:
    shown = app_of(
        {'broker_url': 'memory://me:word@a', 'task_default_queue': 'couchdb', 'security_key': ONE}
    ).conf.table()
    assert shown['broker_url'] == 'memory://me:********@a//'
    assert shown['task_default_queue'] == 'couchdb'
    assert shown['security_key'] == '********'


def test_graph_of_workers_is_shown_without_passwords() -> None:
    app = app_of({'broker_url': SAME, 'result_backend': SAME.replace('/db', '/results')})
    done = CliRunner().invoke(graph, ['workers', 'nodes:w', 'threads:1'], obj=SimpleNamespace(app=app))
    assert done.exit_code == 0, done.output
    assert SECRET not in done.output
    assert OTHER not in done.output
    assert '"couchdb://me:**@a:1/db' in done.output
    assert '"couchdb://me:**@a:1/results' in done.output


def test_connection_masks_passwords_of_alternates_and_keeps_using_them() -> None:
    with Connection(SAME) as connection:
        assert connection.transport.address.password == SECRET
        for one in (connection, connection.clone()):
            assert [node.password for node in one.transport.address.others] == [OTHER]
            info = one.info()
            assert info.pop('password') == SECRET
            assert OTHER not in str(info)
            assert SECRET not in str(info)
            assert [url.partition('@')[2] for url in info['alternates']] == ['a:1/db', 'b:2/db']
        connection.maybe_switch_next()
        assert (connection.hostname, connection.password) == ('b', OTHER)
        assert [node.password for node in connection.transport.address.others] == [SECRET]
        assert OTHER not in str({**connection.info(), 'password': None})


def test_pickled_connection_keeps_the_password() -> None:
    with Connection(SAME) as connection:
        connection.transport  # noqa: B018
        copy = pickle.loads(pickle.dumps(connection))
        assert copy.transport.address.password == SECRET
        assert copy.transport.address.others == ()


def test_backend_url_is_shown_without_passwords() -> None:
    backend = app_of({'result_backend': SAME}).backend
    assert backend.as_uri() == 'couchdb://me:**@a:1/db;couchdb://you:**@b:2/db'
    assert backend.as_uri(include_password=True) == SAME
