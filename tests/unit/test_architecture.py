"""Who may import whom, as the source says."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ('kombu_couchdb', 'celery_couchdb')

#: They decide; they read no socket, no file and no thread's state, and so they can be tested by calling them.
PURE = ('address', 'body', 'errors', 'members', 'message', 'options', 'redaction', 'storable', 'workitem')
#: What the pure ones may need of ours.
PLAIN = {f'kombu_couchdb.{name}' for name in PURE}
#: What reaches the world outside.
OUTSIDE = {'requests', 'urllib3', 'socket', 'http', 'threading', 'subprocess', 'select', 'kombu', 'celery'}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


FILES = {name_of(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob('*.py'))}


def imports_of(module: str) -> set[str]:
    """Return the full names of the modules that `module` imports, anywhere in it; ours as exactly as is known."""
    path = FILES[module]
    package = module.split('.') if path.name == '__init__.py' else module.split('.')[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text('utf-8'))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = '.'.join([*package[:len(package) - node.level + 1], *filter(None, [node.module])]) if node.level \
                else str(node.module)
            # `from . import errors` names a module, `from .errors import NotFound` a member of one.
            found |= {f'{base}.{alias.name}' if f'{base}.{alias.name}' in FILES else base for alias in node.names}
    return found


IMPORTS = {module: imports_of(module) for module in FILES}


def tops(module: str) -> set[str]:
    return {name.partition('.')[0] for name in IMPORTS[module]}


def test_imports_are_read_as_they_are_written() -> None:
    assert {'kombu_couchdb.errors', 'kombu_couchdb.address', 'kombu_couchdb.clock', 'requests', 'requests.adapters'} \
        <= IMPORTS['kombu_couchdb.nodes']
    assert 'kombu_couchdb.client' in IMPORTS['celery_couchdb.store']
    assert 'kombu_couchdb.design' in IMPORTS['kombu_couchdb.store']


def test_no_circle() -> None:
    ours = {module: {name for name in IMPORTS[module] if name in FILES and name != module} for module in FILES}
    assert len(list(TopologicalSorter(ours).static_order())) == len(FILES)  # raises CycleError, which names the circle


@pytest.mark.parametrize('module', [name for name in FILES if name.startswith('kombu_couchdb')])
def test_the_transport_knows_nothing_of_celery(module: str) -> None:
    assert not tops(module) & {'celery', 'celery_couchdb'}


@pytest.mark.parametrize('name', PURE)
def test_pure_modules_need_none_that_does_input_or_output(name: str) -> None:
    module = f'kombu_couchdb.{name}'
    ours = {found for found in IMPORTS[module] if found.startswith('kombu_couchdb')}
    assert ours <= PLAIN
    assert tops(module) & OUTSIDE <= ({'requests'} if name == 'errors' else set())


def test_few_know_requests() -> None:
    allowed = {f'kombu_couchdb.{name}' for name in ('bounds', 'client', 'errors', 'feed', 'http', 'login', 'nodes', 'transport')}
    assert {module for module in FILES if tops(module) & {'requests', 'urllib3'}} <= allowed


def test_kombu_s_classes_stay_at_the_edge() -> None:
    edge = {'kombu_couchdb.transport', 'kombu_couchdb.channel', 'kombu_couchdb.qos'}
    assert {module for module in FILES if any(name.startswith('kombu.transport') for name in IMPORTS[module])} <= \
        edge | {'kombu_couchdb.registration'}  # the last for the table of schemes


def test_only_the_command_speaks_to_people() -> None:
    assert {module for module in FILES if 'click' in tops(module)} <= {name for name in FILES if '.cli' in name}
    printing = {module for module, path in FILES.items() if re.search(r'\bprint\(', path.read_text('utf-8'))}
    assert printing <= {'kombu_couchdb.embedded.__main__', 'kombu_couchdb.embedded'}


def test_one_module_prints_and_one_makes_loggers() -> None:
    """Documents are written by others: these take care that nothing of them reaches a terminal or a log as it is."""
    sources = {module: path.read_text('utf-8') for module, path in FILES.items()}
    printing = r'\bclick\.(echo|secho|confirm)\('
    assert {module for module, text in sources.items() if re.search(printing, text)} == {'celery_couchdb.cli.output'}
    making = r'\bkombu\.log\b|\bgetLogger\('
    assert {module for module, text in sources.items() if re.search(making, text)} <= {
        'kombu_couchdb.log', 'kombu_couchdb.embedded', 'celery_couchdb.brevity'}  # the last two log nothing of a document


def test_workers_need_nothing_of_the_operators() -> None:
    operators = {'kombu_couchdb.admin', 'celery_couchdb.cli', 'celery_couchdb.jobs'}
    ours = {module for module in FILES if not any(module.startswith(name) for name in operators)}
    assert not {found for module in ours for found in IMPORTS[module] if any(found.startswith(name) for name in operators)}


def test_only_what_is_for_tests_knows_pytest() -> None:
    own = {module for module in FILES if module.startswith('celery_couchdb.testing')}
    for module in FILES.keys() - own:
        assert not [name for name in IMPORTS[module] if name.startswith(('pytest', 'celery_couchdb.testing'))]


@pytest.mark.parametrize('module', FILES)
def test_no_file_is_long(module: str) -> None:
    assert len(FILES[module].read_text('utf-8').splitlines()) <= 330
