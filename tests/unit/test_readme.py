"""The commands that README.rst and docs/operations.rst show exist, with the options they give them."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from celery_couchdb.cli import couchdb

ROOT = Path(__file__).parents[2]
README, OPERATIONS = ((ROOT / page).read_text('utf-8') for page in ('README.rst', 'docs/operations.rst'))
SHOWN = sorted(
    {
        *re.findall(r'\$ celery -A shop couchdb (.*)', OPERATIONS),
        *re.findall(r'``celery -A shop couchdb (.*?)``', README),
    }
)


def test_the_app_that_is_shown_loses_no_task_that_runs() -> None:
    """`tests/acceptance/test_acknowledgement.py` has what becomes of it with these settings, and without."""
    block = re.search(r'^\.\. code-block:: python\n\n((?: {4}.*\n|\n)+)', README, re.MULTILINE)
    assert block is not None
    names: dict[str, Any] = {}
    exec(textwrap.dedent(block[1]), names)
    app = names['app']
    assert (app.conf.task_acks_late, app.conf.task_reject_on_worker_lost) == (True, True)
    assert names['add'](2, 3) == 5


def test_the_readme_is_short_and_reads_alone() -> None:
    """A package index shows it without the folder `docs`: neither links nor images into it work there."""
    assert len(README.splitlines()) <= 150
    assert not re.search(r':doc:|:ref:|image::|include::|<docs/', README)
    assert all((ROOT / page).exists() for page in re.findall(r'docs/[\w/]+\.rst', README))


def test_all_commands_are_shown() -> None:
    assert {line.split()[0] for line in SHOWN} == set(couchdb.list_commands(click.Context(couchdb)))


@pytest.mark.parametrize('line', SHOWN)
def test_command_exists(line: str) -> None:
    command: click.Command | None = couchdb
    words = shlex.split(line.partition('|')[0])
    while isinstance(command, click.Group) and words:
        command = command.get_command(click.Context(command), words.pop(0))
    assert command is not None
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith('-')} <= known


def commands(group: click.Group) -> Iterator[click.Command]:
    """Yield all commands of a group, and of those within it."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        yield from commands(command) if isinstance(command, click.Group) else [command]


def test_all_that_ask_can_be_told_not_to_in_the_same_way() -> None:
    told = [option.opts for command in commands(couchdb) for option in command.params if option.name == 'yes']
    assert told == [['--yes', '-y']] * 4
