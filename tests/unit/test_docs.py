"""The documentation names options that there are, and its code blocks can be parsed."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest
from kombu.transport import virtual

import celery_couchdb.options
import kombu_couchdb.options

ROOT = Path(__file__).parents[2]
DOCS = ROOT / 'docs'


def page(name: str) -> str:
    return (DOCS / name).read_text('utf-8')


def test_counterparts_exist() -> None:
    """What stands as an equivalent in the tables is an option of ours, or one of kombu's."""
    text = page('start/from-redis.rst')
    named = set(re.findall(r'^``\w+``\s+``(\w+)``', text, re.MULTILINE))
    known = {
        field.name
        for options in (kombu_couchdb.options.Options, celery_couchdb.options.ResultOptions)
        for field in fields(options)
    }
    assert named
    assert named <= known | set(virtual.Channel.from_transport_options)


@pytest.mark.parametrize('path', sorted(DOCS.rglob('*.rst')), ids=lambda path: str(path.relative_to(DOCS)))
def test_code_blocks_can_be_parsed(path: Path) -> None:
    for block in re.findall(r'^\.\. code-block:: python\n\n((?: {4}.*\n|\n)+)', path.read_text('utf-8'), re.MULTILINE):
        ast.parse(re.sub(r'^ {4}', '', block, flags=re.MULTILINE))


SHOWN = [
    (path, *block)
    for path in sorted(DOCS.rglob('*.rst'))
    for block in re.findall(
        r'^\.\. From (\S+)\n\n\.\. code-block:: \w+\n\n((?: {4}.*\n|\n)+)', path.read_text('utf-8'), re.MULTILINE
    )
]


@pytest.mark.parametrize(('path', 'source', 'block'), SHOWN, ids=[f'{path.stem}-{source}' for path, source, _ in SHOWN])
def test_code_from_examples_is_that_of_the_examples(path: Path, source: str, block: str) -> None:
    shown = re.sub(r'^ {4}', '', block, flags=re.MULTILINE).strip()
    assert f'\n{shown}\n' in f'\n{(ROOT / source).read_text("utf-8")}'


def test_pages_show_their_code_without_sphinx() -> None:
    """Git hosts show the pages as they are, where a `literalinclude` is empty."""
    assert [path for path in DOCS.rglob('*.rst') if 'literalinclude' in path.read_text('utf-8')] == []


@pytest.mark.parametrize('name', ['tutorial', 'django', 'flask', 'fastapi', 'deployment'])
def test_pages_have_code_of_the_examples(name: str) -> None:
    assert [source for path, source, _ in SHOWN if path.stem == name]
