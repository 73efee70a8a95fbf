"""`broker_transport_options` (`kombu_couchdb.options`) and their documentation."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from celery_couchdb.options import ResultOptions
from kombu_couchdb.errors import ConfigurationError
from kombu_couchdb.options import Options

NUMBERS = [f.name for f in fields(Options) if type(f.default) in (int, float)]
WHOLE = [f.name for f in fields(Options) if type(f.default) is int]
SECONDS = [f.name for f in fields(Options) if isinstance(f.default, float)]
SWITCHES = [f.name for f in fields(Options) if isinstance(f.default, bool)]


@pytest.mark.parametrize('name', SECONDS)
def test_seconds_may_be_integers_or_floats(name: str) -> None:
    for value in (1, 0.001):
        found = getattr(Options.of({'visibility_timeout': 10**7, name: value}), name)
        assert (found, type(found)) == (value, float)


@pytest.mark.parametrize('value', [('user', 'secret-word'), {'user': 'secret-word'}, ''])
def test_credentials_themselves_are_refused_without_being_shown(value: Any) -> None:
    with pytest.raises(
        ConfigurationError,
        match='credentials must be "environment", "file:" with a path, or the dotted path of a function',
    ) as caught:
        Options.of({'credentials': value})
    assert 'secret-word' not in str(caught.value)


@pytest.mark.parametrize('value', ['digest', None])
def test_unknown_authentication_method_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match='auth must be one of basic, cookie'):
        Options.of({'auth': value})


MAY_BE_ZERO = ['delivery_limit', 'keep_done', 'keep_failed', 'receipts_retention']


@pytest.mark.parametrize('name', [name for name in NUMBERS if name not in MAY_BE_ZERO])
def test_value_that_is_not_a_positive_number_is_refused_by_name(name: str) -> None:
    for value in ('5', None, True, 0, -0.5, float('inf'), float('nan')):
        said = rf'\b{name}\b.*number.*above 0, at most 1,000,000,000, not {re.escape(repr(value))}'
        with pytest.raises(ConfigurationError, match=said):
            Options.of({name: value})


@pytest.mark.parametrize('name', MAY_BE_ZERO[1:])
def test_completed_messages_and_receipts_are_kept_for_0_seconds_or_more(name: str) -> None:
    assert getattr(Options.of({name: 0}), name) == 0
    said = f'{name} must be a number of seconds from 0 on, at most 1,000,000,000, not -1'
    with pytest.raises(ConfigurationError, match=said):
        Options.of({name: -1})


@pytest.mark.parametrize('value', ['5', True, -1, 2.5])
def test_invalid_delivery_limit_is_refused(value: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=rf'delivery_limit must be a whole number.*not {re.escape(repr(value))}'
    ):
        Options.of({'delivery_limit': value})


@pytest.mark.parametrize('name', WHOLE)
def test_fractions_of_messages_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f'{name} must be a whole number'):
        Options.of({name: 2.0})


@pytest.mark.parametrize('name', SWITCHES)
def test_switches_must_be_booleans(name: str) -> None:
    for value in ('true', 1, None):
        with pytest.raises(ConfigurationError, match=f'{name} must be True or False, not {value!r}'):
            Options.of({name: value})


def test_error_about_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="unknown transport option 'socket_timeout'") as caught:
        Options.of({'visibility_timeout': 5, 'socket_timeout': 1})
    for f in fields(Options):
        assert f.name in str(caught.value)


def test_error_names_the_setting_and_all_that_is_wrong_in_it() -> None:
    given = {'socket_timeout': 5, 'visibility_time': 1, 'keep_done': -1, 'delivery_limit': 2.5, 'sep': ':'}
    with pytest.raises(ConfigurationError) as caught:
        Options.of(given)
    text = str(caught.value)
    unknown = (
        r"unknown transport options 'sep', 'socket_timeout', 'visibility_time' \(did you mean visibility_timeout\?\);"
    )
    assert re.match(r'broker_transport_options: transport option \w+ must be', text)
    assert 'transport option delivery_limit must be' in text
    assert re.search(rf'; {unknown} known are: ', text)
    assert 'transport option keep_done must be a number of seconds from 0 on, at most 1,000,000,000, not -1' in text


def test_options_of_kombu_are_ignored() -> None:
    assert Options.of({'max_retries': object(), 'callback': object(), 'deadletter_queue': object()}) == Options()


def rows_of(title: str) -> list[tuple[str, str]]:
    """Return names and defaults in the table of the page of settings that follows a text."""
    text = (Path(__file__).parents[2] / 'docs/reference/settings.rst').read_text('utf-8').partition(title)[2]
    return re.findall(r'^``(\w+)``\s+(\S+)\s+\S', re.split(r'^=+ =+ =+$', text, flags=re.MULTILINE)[2], re.MULTILINE)


def test_documentation_lists_every_option_with_its_default() -> None:
    rows = rows_of('In ``broker_transport_options``.') + rows_of('In ``broker_transport_options``, for')
    assert sorted(rows) == sorted((field.name, str(field.default)) for field in fields(Options))


def test_documentation_lists_every_option_of_results_with_its_default() -> None:
    rows = rows_of('In ``result_backend_transport_options``, which') + rows_of(
        'In ``result_backend_transport_options``, for'
    )
    without = ('retry_policy', 'global_keyprefix')
    assert sorted(row for row in rows if row[0] not in without) == sorted(
        (field.name, str(field.default)) for field in fields(ResultOptions) if field.name not in without
    )
    text = (Path(__file__).parents[2] / 'docs/reference/settings.rst').read_text('utf-8')
    for name, value in ResultOptions().retry_policy.items():
        assert f'``{name}`` ({value})' in text


@pytest.mark.parametrize('name', ['request_timeout', 'connect_timeout'])
@pytest.mark.parametrize(('value', 'lease'), [(60.0, None), (5.0, 3.0)])
def test_time_limits_longer_than_the_lease_are_refused(name: str, value: float, lease: float | None) -> None:
    given = {name: value, **({} if lease is None else {'visibility_timeout': lease})}
    with pytest.raises(
        ConfigurationError,
        match=rf'{name} \({value:g} s\) must be less than visibility_timeout '
        rf'\({lease or 60:g} s\): while a request hangs no heartbeat is sent',
    ):
        Options.of(given)
