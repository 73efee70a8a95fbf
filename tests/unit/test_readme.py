"""The commands in README.rst and in the documentation exist, with their options."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import click
import pytest

from celery_couchdb.cli import couchdb

ROOT = Path(__file__).parents[2]
README = (ROOT / 'README.rst').read_text('utf-8')
QUICKSTART = (ROOT / 'docs/start/quickstart.rst').read_text('utf-8')
DOCS = '\n'.join(path.read_text('utf-8') for path in sorted((ROOT / 'docs').rglob('*.rst')))
SHOWN = sorted(
    {
        *re.findall(r'^ +(?:\$ )?celery -A shop couchdb (.*)', DOCS, re.MULTILINE),
        *re.findall(r'``celery -A shop couchdb (\w[^`]*)``', README + DOCS),
    }
)


@pytest.mark.parametrize('text', [README, QUICKSTART], ids=['readme', 'quickstart'])
def test_first_app_has_the_recommended_settings(text: str) -> None:
    """`tests/acceptance/test_acknowledgement.py` tests what these settings do when a worker is killed."""
    block = re.search(r'^\.\. code-block:: python\n\n((?: {4}.*\n|\n)+)', text, re.MULTILINE)
    assert block is not None
    # Celery adds the app's tasks to apps of later tests, too: each needs a module, and a name of its own.
    names: dict[str, Any] = {'__name__': f'first_app_{text.count(chr(10))}'}
    exec(textwrap.dedent(block[1]), names)
    app = names['app']
    assert (app.conf.task_acks_late, app.conf.task_reject_on_worker_lost) == (True, True)
    assert names['add'](2, 3) == 5


def test_readme_is_short_and_its_links_lead_somewhere() -> None:
    links = re.findall(r'(?:<|^\.\. _[^:]+: )([\w./-]+\.\w+)(?:>`_|$)', README, re.MULTILINE)
    assert len(links) > 12
    assert [link for link in links if not (ROOT / link).is_file()] == []
    assert README.count('\n') <= 150


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
