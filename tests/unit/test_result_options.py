"""`result_backend_transport_options` (`celery_couchdb.options`) and their documentation."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
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
    with pytest.raises(ConfigurationError, match="unknown transport option 'retry_polcy'") as caught:
        backend_of(retry_polcy={})
    for name in (*(f.name for f in fields(ResultOptions)), 'retry_policy', 'global_keyprefix'):
        assert re.search(rf'known are: .*\b{name}\b', str(caught.value))


def test_documentation_lists_every_option_with_its_default() -> None:
    text = (Path(__file__).parents[2] / 'docs/reference/settings.rst').read_text('utf-8')
    section = text.split('\nIn ``result_backend_transport_options``')[1]
    table = re.split(r'^=+ =+ =+$', section, flags=re.MULTILINE)[2]
    rows = re.findall(r'^``(\w+)``\s+(\S+)\s+\S', table, re.MULTILINE)
    named = [
        (f.name, str(f.default)) for f in fields(ResultOptions) if f.name not in ('retry_policy', 'global_keyprefix')
    ]
    assert [row for row in rows if row[0] not in ('retry_policy', 'global_keyprefix')] == named
    for name, value in ResultOptions().retry_policy.items():
        assert f'``{name}`` ({value})' in table
