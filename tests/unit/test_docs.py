"""The documentation names what there is: options, and the words of errors and log lines."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from kombu.transport import virtual

import celery_couchdb.options
import kombu_couchdb.options

ROOT = Path(__file__).parents[2]
DOCS = ROOT / 'docs'
PACKAGES = ('kombu_couchdb', 'celery_couchdb')
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob('*.py'))]


def page(name: str) -> str:
    return (DOCS / name).read_text('utf-8')


def rows(text: str) -> set[str]:
    """Return what stands in code in the first column of tables."""
    tables = re.findall(r'^=+(?: +=+)+\n.*\n=+(?: +=+)+\n((?:[^=\n].*\n)+)', text, re.MULTILINE)
    return set(re.findall(r'^``([\w.*-]+)``\s', '\n'.join(tables), re.MULTILINE))


def said() -> str:
    """Return all texts in our sources but docstrings, one a line, with a gap where something is filled in."""
    texts = []
    for path in SOURCES:
        tree = ast.parse(path.read_text('utf-8'))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    ''.join(str(part.value) if isinstance(part, ast.Constant) else '…' for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return '\n'.join(texts)


def options_of_redis() -> set[str]:
    """Return the transport options of kombu's Redis, read in its source: it cannot be imported without redis-py."""
    spec = find_spec('kombu.transport.redis')
    assert spec is not None
    assert spec.origin is not None
    found: set[Any] = set(virtual.Channel.from_transport_options)
    for node in ast.walk(ast.parse(Path(spec.origin).read_text('utf-8'))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == 'from_transport_options':
            found |= {part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)}
    return found


def test_every_option_of_redis_has_its_counterpart() -> None:
    options = options_of_redis()
    assert options >= {'visibility_timeout', 'priority_steps', 'master_name', 'deadletter_queue'}
    assert options <= rows(page('start/from-redis.rst'))


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


def quoted() -> list[list[str]]:
    """Return the messages of the page on troubleshooting, each as its fixed words between the parts that differ."""
    terms = re.findall(r'^``(.+)``\n {4}\S', page('production/troubleshooting.rst'), re.MULTILINE)
    return [[words for words in re.split('\\s*…\\s*', term) if words] for term in terms]


def alerts() -> list[str]:
    """Return the texts of log lines in the alert table of the page on monitoring."""
    table = page('production/monitoring.rst').partition('Line has')[2]
    return re.findall(r'^``(.+?)`` ', table, re.MULTILINE)


def logged() -> dict[str, str]:
    """Return the texts of all log lines that are warnings or worse, by where they are."""
    found = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text('utf-8'))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and ast.unparse(node.func.value) == 'logger'
                and node.func.attr in ('warning', 'error', 'critical', 'exception', 'log')
            ):
                text = ''.join(
                    str(part.value) for arg in node.args for part in ast.walk(arg) if isinstance(part, ast.Constant)
                )
                found[f'{path.relative_to(ROOT)}:{node.lineno}'] = text
    return found


def test_quoted_messages_have_the_words_of_the_source() -> None:
    assert len(quoted()) > 100
    texts = said()
    assert [words for term in quoted() for words in term if words not in texts] == []


def test_alerts_are_log_lines_or_errors_that_the_page_on_troubleshooting_explains() -> None:
    assert len(alerts()) > 5
    texts = said()
    assert [words for words in alerts() if words not in texts] == []
    assert [words for words in alerts() if not any(term[0] in words for term in quoted())] == []


def test_every_warning_and_error_of_the_log_is_explained() -> None:
    unexplained = {
        place: text
        for place, text in logged().items()
        if not any(all(words in text for words in term) for term in quoted())
    }
    assert unexplained == {}


@pytest.mark.parametrize('path', sorted(DOCS.rglob('*.rst')), ids=lambda path: str(path.relative_to(DOCS)))
def test_code_blocks_can_be_parsed(path: Path) -> None:
    for block in re.findall(r'^\.\. code-block:: python\n\n((?: {4}.*\n|\n)+)', path.read_text('utf-8'), re.MULTILINE):
        ast.parse(re.sub(r'^ {4}', '', block, flags=re.MULTILINE))
