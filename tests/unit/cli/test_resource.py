"""Lists, details and changes of a resource, whose items are texts here."""

from __future__ import annotations

from collections.abc import Sequence

import click
import pytest
from click.testing import CliRunner, Result

from celery_couchdb.cli.resource_commands import change, print_list
from celery_couchdb.resources.change import Change, Part
from celery_couchdb.resources.columns import Column
from celery_couchdb.resources.resource import Resource, Selection, counted
from kombu_couchdb.errors import ServerUnavailable

TEXTS = Resource[str](lambda part: [{'text': text} for text in part], [Column('TEXT', 'text', right=True)])


MORE = 'These are the first {}; there are more (--limit).\n'


def test_short_list(capsys: pytest.CaptureFixture[str]) -> None:
    def show(texts: list[str], *, as_json: bool) -> str:
        print_list(TEXTS, texts, as_json, empty='none', limit=2)
        return '+'.join(capsys.readouterr())

    assert show([], as_json=False) == 'none\n+'
    assert show([], as_json=True) == '+'
    assert show(['a', 'b'], as_json=False) == 'TEXT\n   a\n   b\n+'
    assert show(['a', 'b', 'c'], as_json=False) == 'TEXT\n   a\n   b\n+' + MORE.format(2)
    assert show(['a', 'b', 'c'], as_json=True) == '{"text": "a"}\n{"text": "b"}\n+'


def changed(count: int, refused: dict[str, str], *, yes: bool = True, total: int = 3) -> tuple[Result, list[int]]:
    """Drop three texts, of which `count` can be dropped in each batch; return the result and the sizes of batches."""
    batches: list[int] = []

    @click.command
    @click.pass_context
    def command(ctx: click.Context) -> None:
        def act(part: Sequence[str]) -> tuple[int, dict[str, str]]:
            batches.append(len(part))
            return min(count, len(part)), refused

        selection = Selection(counted(total, 'text'), ['x'] * total, total)
        change(ctx, 'Drop', selection, act, 'dropped', yes=yes)

    return CliRunner().invoke(command, input='n\n'), batches


def test_change_is_done_in_batches() -> None:
    done, batches = changed(250, {}, total=550)
    assert (done.exit_code, batches) == (0, [250, 250, 50])
    assert done.stdout == '550 dropped.\n'


def test_change_is_confirmed() -> None:
    done, batches = changed(3, {}, yes=False)
    assert (done.exit_code, batches) == (1, [])
    assert done.stdout == 'Drop 3 texts? [y/N]: n\n'
    assert changed(0, {}, yes=False, total=0)[0].stdout == '0 dropped.\n'  # there is nothing to confirm


def test_refused_and_lost_changes_are_failures() -> None:
    done, _ = changed(2, {'b': 'it is new'})
    assert (done.exit_code, done.stdout, done.stderr) == (1, '2 dropped.\n', 'b: it is new\n')
    done, _ = changed(1, {})
    assert (done.exit_code, done.stdout) == (1, '1 dropped.\n')
    assert done.stderr == 'Error: 2 were changed by somebody else just now\n'


def test_change_is_done_although_nobody_knows_who_consumes() -> None:
    def consumed() -> Sequence[str]:
        raise ServerUnavailable('no response')

    done = Change('job', 1, [Part(1, {'moved': 1}, {}, ['slow'])], consumed)
    assert len([*done.run()]) == 1
    assert done.summary == ['1 job moved']
