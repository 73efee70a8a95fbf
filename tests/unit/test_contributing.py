"""CONTRIBUTING.rst names files and make targets that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / 'CONTRIBUTING.rst').read_text('utf-8')


def test_every_path_exists() -> None:
    folders = '|'.join(path.name for path in ROOT.iterdir() if path.is_dir() and path.name.isidentifier())
    named = re.findall(rf'``((?:{folders})/[\w./]+)``', TEXT)
    assert len(named) > 40
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_table_has_a_test_in_every_row() -> None:
    rows = re.split(r'^   \* - ', TEXT, flags=re.MULTILINE)[2:]
    assert len(rows) == 10
    for row in rows:
        _, touched, tested = re.split(r'^     - ', row, flags=re.MULTILINE)
        assert re.search(r'``(kombu_couchdb|celery_couchdb|chaos)/', touched)
        assert '``tests/' in tested


def test_all_make_targets_are_named() -> None:
    targets = set(re.findall(r'^(\w+):.*## ', (ROOT / 'Makefile').read_text('utf-8'), re.MULTILINE))
    assert targets - {'help'} == set(re.findall(r'^``make (\w+)``', TEXT, re.MULTILINE))
