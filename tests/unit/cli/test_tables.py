"""Numbers, ages, sizes and tables in the output of commands."""

from __future__ import annotations

import json

import click
import pytest

from celery_couchdb.cli.tables import (
    Cell,
    Column,
    count_cell,
    echo,
    format_duration,
    format_size,
    format_table,
    json_line,
    print_list,
    printable,
    rate_cell,
    remove_unwanted_colours,
    shorten,
)


@pytest.mark.parametrize(
    ('seconds', 'text'),
    [
        (0, '0 s'),
        (-3, '0 s'),
        (59.9, '59 s'),
        (60, '1 m 0 s'),
        (192, '3 m 12 s'),
        (3599, '59 m 59 s'),
        (3600, '1 h 0 m'),
        (7500, '2 h 5 m'),
        (86399, '23 h 59 m'),
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
        (1000, '1.0 kB'),
        (4_200_000, '4.2 MB'),
        (999_949, '999.9 kB'),
        (999_999, '1.0 MB'),
        (3_100_000_000, '3.1 GB'),
        (5_000 * 10**12, '5,000.0 TB'),
        (None, '-'),
    ],
)
def test_size(octets: int | None, text: str) -> None:
    assert format_size(octets) == text


def test_number_has_separators_and_zero_has_no_style() -> None:
    assert count_cell(1234567, fg='red') == Cell('1,234,567', {'fg': 'red'})
    assert count_cell(0, fg='red') == Cell('0', {'dim': True})
    assert count_cell(None).text == '-'


@pytest.mark.parametrize(
    ('per_second', 'text'), [(0, '0'), (0.001, '<0.1'), (0.05, '0.1'), (12.34, '12.3'), (4321, '4,321.0')]
)
def test_rate(per_second: float, text: str) -> None:
    assert rate_cell(per_second).text == text


@pytest.mark.parametrize(('length', 'text'), [(9, 'abcdefgh'), (8, 'abcdefgh'), (7, 'abc…fgh'), (4, 'ab…h'), (1, '…')])
def test_long_text_is_cut_in_the_middle(length: int, text: str) -> None:
    assert shorten('abcdefgh', length) == text


#: Control characters: clear the screen, start a line, both as C1 characters, right-to-left text, and a single
#: surrogate.
EVIL = 'a\x1b[2J\r\nb\x9b2J\x85\u2028\u202e\ud800'


def test_control_characters_in_a_name_are_escaped() -> None:
    assert printable('müll\x1b[2J\n') == r'müll\x1b[2J\n'
    assert printable(EVIL) == r'a\x1b[2J\r\nb\x9b2J\x85\u2028\u202e\ud800'
    assert '\x1b' not in format_table([Column('NAME')], [['\x1b[2J']], 80).split('\n')[1]


def test_control_characters_in_a_line_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    echo(EVIL)
    echo(EVIL, err=True)
    assert capsys.readouterr() == (printable(EVIL) + '\n', printable(EVIL) + '\n')


def test_control_characters_in_json_are_escaped() -> None:
    value = {EVIL: ['grün', EVIL, '\U000e0001', object]}
    line = json_line(value)
    assert line.isprintable()
    assert 'grün' in line
    assert json.loads(line) == {EVIL: ['grün', EVIL, '\U000e0001', repr(object)]}


def test_numbers_are_right_aligned_and_names_left_aligned() -> None:
    text = format_table(
        [Column('QUEUE'), Column('READY', right=True)], [['q', count_cell(12)], ['longer name', count_cell(1234)]], 80
    )
    assert click.unstyle(text).split('\n') == [
        'QUEUE        READY',
        'q               12',
        'longer name  1,234',
    ]


def test_longest_shortenable_column_is_cut_first() -> None:
    columns = [Column('QUEUE', min_width=5), Column('HOST', min_width=5), Column('READY', right=True)]
    lines = click.unstyle(format_table(columns, [['q' * 60, 'h' * 30, '1,234,567']], 60)).split('\n')
    assert max(map(len, lines)) == 60
    assert lines[1].split()[0].count('q') < 60
    assert '…' not in format_table(columns, [['q' * 20, 'h' * 20, '1']], 60)
    narrow = click.unstyle(format_table(columns, [['q' * 60, 'h' * 30, '1,234,567']], 10)).split('\n')
    assert narrow[1] == 'qq…qq  hh…hh  1,234,567'


def test_colours_do_not_affect_the_width() -> None:
    plain, styled = (
        format_table([Column('A'), Column('B')], [[Cell('x', style), 'y']], 80) for style in ({}, {'fg': 'red'})
    )
    assert styled != plain
    assert click.unstyle(styled) == click.unstyle(plain)


@pytest.mark.parametrize('no_color', [True, False])
def test_colours_can_be_switched_off(no_color: bool) -> None:
    class Celery:
        pass

    Celery.no_color = no_color  # type: ignore[attr-defined]
    with click.Context(click.Command('status'), obj=Celery()):
        assert ('\x1b' in remove_unwanted_colours(click.style('red', fg='red'))) is not no_color


def test_long_list_is_printed_in_parts_of_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f'{number:03}' for number in range(450)] + ['longer', 'left']
    columns = [Column('NUMBER', right=True), Column('X')]
    for limit, more in ((451, 'more\n'), (452, '')):
        print_list(
            iter(texts),
            limit,
            None,
            columns,
            lambda part: [[text, '|'] for text in part],
            empty='none',
            more=lambda: 'more',
        )
        printed, errors = capsys.readouterr()
        assert printed.splitlines()[:3] == ['NUMBER  X', '   000  |', '   001  |']
        assert len(printed.splitlines()) == limit + 1
        assert 'longer  |' in printed.splitlines()
        assert errors == more


def test_short_list(capsys: pytest.CaptureFixture[str]) -> None:
    def show(texts: list[str], *, as_json: bool) -> str:
        print_list(
            iter(texts),
            2,
            (lambda part: ([text] for text in part)) if as_json else None,
            [Column('NAME')],
            lambda part: [[text] for text in part],
            empty='none',
            more=lambda: 'more',
        )
        return '+'.join(capsys.readouterr())

    assert show([], as_json=False) == 'none\n+'
    assert show([], as_json=True) == '+'
    assert show(['a', 'b'], as_json=False) == 'NAME\na\nb\n+'
    assert show(['a', 'b', 'c'], as_json=False) == 'NAME\na\nb\n+more\n'
    assert show(['a', 'b', 'c'], as_json=True) == '["a"]\n["b"]\n+'
