"""Numbers, ages, sizes and tables in the output of commands."""

from __future__ import annotations

import json
from types import SimpleNamespace

import click
import pytest

from celery_couchdb.cli.tables import Duration, format_table, remove_unwanted_colours, shorten
from celery_couchdb.resources.columns import (
    Cell,
    Column,
    count_cell,
    format_ago,
    format_date,
    format_dated,
    format_duration,
    format_size,
    json_line,
    rate_cell,
)
from celery_couchdb.resources.inputs import json_value
from kombu_couchdb.log import printable


@pytest.mark.parametrize(
    ('seconds', 'text'),
    [
        (0, '0 s'),
        (-3, '0 s'),
        (59.9, '59 s'),
        (3599, '59 m 59 s'),
        (3600, '1 h 0 m'),
        (4 * 86400 + 3 * 3600, '4 d 3 h'),
        (1e8, '1,157 d 9 h'),
        (None, '-'),
    ],
)
def test_age(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ('octets', 'text'),
    [
        (0, '0 B'),
        (999, '999 B'),
        (999_949, '999.9 kB'),
        (999_999, '1.0 MB'),
        (5_000 * 10**12, '5,000.0 TB'),
        (None, '-'),
    ],
)
def test_size(octets: int | None, text: str) -> None:
    assert format_size(octets) == text


def test_number_has_separators_and_zero_has_no_style() -> None:
    assert [rate_cell(rate).text for rate in (0, 0.001, 4321)] == ['0', '<0.1', '4,321.0']
    assert count_cell(1234567, 'bad') == Cell('1,234,567', 'bad')
    assert count_cell(0, 'bad') == Cell('0', 'dim')
    assert count_cell(None).text == '-'


@pytest.mark.parametrize(('length', 'text'), [(8, 'abcdefgh'), (7, 'abcdef…'), (1, '…')])
def test_long_text_is_cut_at_its_end(length: int, text: str) -> None:
    assert shorten('abcdefgh', length) == text


#: Control characters: clear the screen, start a line, both as C1 characters, right-to-left text, and a single
#: surrogate.
EVIL = 'a\x1b[2J\r\nb\x9b2J\x85\u2028\u202e\ud800'


def test_control_characters_in_a_name_are_escaped() -> None:
    assert printable('müll\x1b[2J\n') == r'müll\x1b[2J\n'
    assert printable(EVIL) == r'a\x1b[2J\r\nb\x9b2J\x85\u2028\u202e\ud800'
    assert '\x1b' not in format_table([Column('NAME', 'name')], [{'name': '\x1b[2J'}], 80).split('\n')[1]


def test_control_characters_in_json_are_escaped() -> None:
    value = {EVIL: ['grün', EVIL, '\U000e0001', object]}
    line = json_line(value)
    assert line.isprintable()
    assert 'grün' in line
    assert json.loads(line) == {EVIL: ['grün', EVIL, '\U000e0001', repr(object)]}


def test_numbers_are_right_aligned_and_names_left_aligned() -> None:
    text = format_table(
        [Column('QUEUE', 'name'), Column('READY', 'ready', count_cell, right=True)],
        [{'name': 'q', 'ready': 12}, {'name': 'longer name', 'ready': 1234}, {}],
        80,
    )
    assert click.unstyle(text).split('\n') == [
        'QUEUE        READY',
        'q               12',
        'longer name  1,234',
        '-                -',
    ]


def test_longest_shortenable_column_is_cut_first() -> None:
    columns = [Column('QUEUE', 'q', min_width=5), Column('HOST', 'h', min_width=5), Column('READY', 'n', right=True)]
    wide = {'q': 'q' * 60, 'h': 'h' * 30, 'n': '1,234,567'}
    assert max(map(len, click.unstyle(format_table(columns, [wide], 60)).split('\n'))) == 60
    assert '…' not in format_table(columns, [{'q': 'q' * 20, 'h': 'h' * 20, 'n': 1}], 60)
    narrow = click.unstyle(format_table(columns, [{**wide, 'h': 'h h ' * 9}], 10)).split('\n')
    assert narrow[1:3] == ['qqqqq  h h …  1,234,567', 'qqqqq']
    forged = click.unstyle(format_table(columns, [{**wide, 'q': 'q' * 100_000}], 60)).split('\n')
    assert len(forged) < 20, 'a name of a forged document does not fill the terminal'


def test_names_are_broken_into_lines_after_a_dot_or_the_like() -> None:
    columns = [Column('ID', 'id', min_width=9), Column('TASK', 'task', min_width=8), Column('N', 'n', right=True)]
    columns += [Column('QUEUES', 'queues', min_width=10), Column('ERROR', 'error', min_width=10)]
    row = {'id': '3c02b1f8-1d4e', 'task': 'shop.orders.charge', 'n': 7, 'error': 'ValueError: no such card'}
    table = click.unstyle(format_table(columns, [{**row, 'queues': 'celery, mail.high'}], 56)).split('\n')
    assert table == [
        'ID         TASK          N  QUEUES         ERROR',
        '3c02b1f8…  shop.orders.  7  celery,        ValueError: …',
        '           charge           mail.high',
    ]


def test_titles_of_numbers_are_cut_before_names() -> None:
    columns = [Column('QUEUE', 'q', min_width=6), Column('PREFETCHED', 'n', right=True)]
    rows = [{'q': 'billing', 'n': '1'}, {'q': 'mail', 'n': '1,000,000'}]
    assert format_table(columns, rows, 18).split('\n')[1:] == ['billing          1', 'mail     1,000,000']
    assert click.unstyle(format_table(columns, rows, 18)).split('\n')[0] == 'QUEUE    PREFETCH…'


def test_id_is_cut_to_eight_characters_if_the_table_is_too_wide() -> None:
    columns = [Column('ID', 'id', min_width=9), Column('TASK', 'task', min_width=8)]
    row = {'id': '3c02b1f8-1d4e-4c1e-9d36-0f6c1f2a9b11', 'task': 'shop.reports.monthly'}
    assert row['id'] in format_table(columns, [row], 80)
    assert click.unstyle(format_table(columns, [row], 40)).split('\n')[1] == '3c02b1f8…  shop.reports.monthly'


@pytest.mark.parametrize('no_color', [True, False])
def test_colours_can_be_switched_off(no_color: bool) -> None:
    with click.Context(click.Command('status'), obj=SimpleNamespace(no_color=no_color)):
        assert ('\x1b' in remove_unwanted_colours(click.style('red', fg='red'))) is not no_color


def test_date_and_age_of_a_document_can_be_anything() -> None:
    assert format_date(0) == '1970-01-01 00:00:00 UTC'
    assert [format_date(value) for value in (None, 'then', 1e99)] == ['-', '"then"', '1e+99']
    assert [format_dated(value, 100.0) for value in (40, 'then')] == ['1970-01-01 00:00:40 UTC (1 m 0 s ago)', '"then"']
    assert [format_ago(value, 100.0) for value in (40, None, 'then')] == ['1 m 0 s', '-', '-']


@pytest.mark.parametrize(('text', 'seconds'), [('90', 90), ('1.5m', 90), ('1d', 86400)])
def test_duration(text: str, seconds: float) -> None:
    assert Duration()(text) == seconds


@pytest.mark.parametrize('text', ['', '1w', '-1s', 'nan'])
def test_duration_that_is_none_is_a_usage_error(text: str) -> None:
    with pytest.raises(click.BadParameter, match='give a number and a unit, such as 90s'):
        Duration()(text)


def test_duration_that_is_too_short_is_a_usage_error() -> None:
    assert Duration(least=0.1)('0.1') == 0.1
    with pytest.raises(click.BadParameter, match=r'it must be from 0\.1 to 1,000,000,000 seconds, not 0\.05s'):
        Duration(least=0.1)('0.05s')


@pytest.mark.parametrize(('kind', 'text'), [(list, '{}'), (dict, '[]'), (list, '[1'), (dict, '[' * 9999)])
def test_option_must_be_a_list_or_an_object(kind: type[object], text: str) -> None:
    assert json_value('[1, "two"]', list) == [1, 'two']
    with pytest.raises(ValueError, match=r'it must be (a list|an object) in JSON, not'):
        json_value(text, kind)
