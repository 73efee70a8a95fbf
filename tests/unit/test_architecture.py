"""The import rules of the packages, checked in the source."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ('kombu_couchdb', 'celery_couchdb')

#: The other folders of their package that the modules of a folder may import; see docs/development/architecture.rst.
BELOW_QUEUES = {'documents', 'couchdb', 'design'}
BELOW_FLEET = {'leases', 'queues', *BELOW_QUEUES}
BELOW_CONSUMER = {'fleet', *BELOW_FLEET}
FOLDERS: dict[str, set[str]] = {
    'kombu_couchdb.couchdb': set(),
    'kombu_couchdb.documents': set(),
    'kombu_couchdb.design': {'documents'},
    'kombu_couchdb.queues': BELOW_QUEUES,
    'kombu_couchdb.leases': {'queues', *BELOW_QUEUES},
    'kombu_couchdb.fleet': BELOW_FLEET,
    'kombu_couchdb.limits': BELOW_CONSUMER,
    'kombu_couchdb.consumer': {'limits', *BELOW_CONSUMER},
    'kombu_couchdb.transport': {'consumer', *BELOW_CONSUMER},
    'kombu_couchdb.admin': BELOW_CONSUMER,
    'kombu_couchdb.embedded': set(),
    'kombu_couchdb.contrib.parcels': {'transport', 'admin', *BELOW_CONSUMER},
    'kombu_couchdb.contrib.regions': {'contrib.parcels', 'transport', 'admin', *BELOW_CONSUMER},
    'celery_couchdb.design': set(),
    'celery_couchdb.results': {'design'},
    'celery_couchdb.waiting': {'results', 'design'},
    'celery_couchdb.chords': {'results', 'waiting', 'design'},
    'celery_couchdb.worker': {'results', 'chords', 'patches'},
    'celery_couchdb.patches': set(),
    'celery_couchdb.contrib.metrics': {'worker', 'patches', 'cli', 'resources', 'web'},
    'celery_couchdb.resources': {'backend', 'connections', 'jobs', 'failures', 'stored_results', 'worker'},
    'celery_couchdb.contrib.parcels': {'backend', 'results', 'patches', 'cli', 'resources', 'web'},
    'celery_couchdb.contrib.regions': {'backend', 'results', 'contrib.parcels', 'cli', 'resources', 'web'},
    'celery_couchdb.contrib.beat': {'audit', 'cli', 'connections', 'resources', 'jobs', 'web'},
    'celery_couchdb.web': {'cli', 'resources', 'audit', 'jobs', 'failures', 'remote_control'},
    'celery_couchdb.testing': set(),
}
#: Modules beside the folders, which every folder may import.
SHARED = {
    *map(
        'kombu_couchdb.{}'.format, ('errors', 'flow', 'log', 'options', 'outage', 'room', 'rooms', 'schema', 'values')
    ),
    'celery_couchdb.options',
    'celery_couchdb.room',
    'celery_couchdb.rooms',
}

#: The folders that can be removed; see `kombu_couchdb.rooms`.
ROOMS = {
    *(f'kombu_couchdb.{name}' for name in ('contrib.parcels', 'contrib.regions', 'embedded')),
    *(f'celery_couchdb.contrib.{name}' for name in ('beat', 'metrics', 'parcels', 'regions')),
    *(f'celery_couchdb.{name}' for name in ('testing', 'web')),
}

#: What operators use, and no worker: folders, and modules of rooms.
OPERATORS = (
    'kombu_couchdb.admin',
    'kombu_couchdb.contrib.parcels.device_setup',
    *(f'celery_couchdb.{name}' for name in ('cli', 'resources', 'jobs', 'failures', 'stored_results', 'web')),
    'celery_couchdb.remote_control',
    'celery_couchdb.plans',
    *(f'celery_couchdb.contrib.{room}.{name}' for room in ('parcels', 'regions') for name in ('cli', 'page')),
    *(f'celery_couchdb.contrib.beat.{name}' for name in ('cli', 'inputs', 'page', 'resource', 'words')),
    *(f'celery_couchdb.contrib.metrics.{name}' for name in ('cli', 'exporter', 'page')),
)

#: Modules for input and output.
OUTSIDE = {'requests', 'urllib3', 'socket', 'http', 'threading', 'subprocess', 'select', 'kombu', 'celery'}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


FILES = {name_of(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob('*.py'))}


@cache
def imports_of(module: str) -> set[str]:
    """Return the full names of all modules that `module` imports, anywhere in its source."""
    path = FILES[module]
    package = module.split('.') if path.name == '__init__.py' else module.split('.')[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text('utf-8'))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = (
                '.'.join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
                if node.level
                else str(node.module)
            )
            # `from . import errors` names a module, `from .errors import NotFound` a member of one.
            found |= {f'{base}.{alias.name}' if f'{base}.{alias.name}' in FILES else base for alias in node.names}
    return found


def tops(module: str) -> set[str]:
    return {name.partition('.')[0] for name in imports_of(module)}


def test_imports_have_no_cycle() -> None:
    ours = {module: {name for name in imports_of(module) if name in FILES and name != module} for module in FILES}
    assert len(list(TopologicalSorter(ours).static_order())) == len(FILES)  # raises CycleError, which names the cycle


def test_transport_does_not_import_celery() -> None:
    ours = [module for module in FILES if module.startswith('kombu_couchdb')]
    assert 'requests' in tops('kombu_couchdb.couchdb.http')
    assert not [module for module in ours if tops(module) & {'celery', 'celery_couchdb'}]


def folder_of(module: str) -> str:
    """Return the folder of a module, such as `kombu_couchdb.couchdb`; the module itself if it is in none."""
    parts = module.split('.')
    return '.'.join(parts[: 3 if parts[1:2] == ['contrib'] else 2])


@pytest.mark.parametrize('folder', FOLDERS)
def test_folders_import_only_folders_below_them(folder: str) -> None:
    package = folder.partition('.')[0]
    allowed = {folder, package, *SHARED, *(f'{package}.{name}' for name in FOLDERS[folder])}
    found = {
        folder_of(name)
        for module in FILES
        if folder_of(module) == folder
        for name in imports_of(module)
        if name.partition('.')[0] == package
    }
    assert found <= allowed


def test_every_folder_has_a_rule() -> None:
    found = {folder_of(module) for module, path in FILES.items() if len(path.relative_to(ROOT).parts) > 2}
    found -= {f'{package}.contrib' for package in PACKAGES}
    assert found - {'celery_couchdb.cli'} == set(FOLDERS)  # the commands may import everything


def test_documents_and_errors_do_no_input_or_output() -> None:
    """These modules read no socket, file or state of a thread, so that tests just call their functions."""
    pure = {module for module in FILES if folder_of(module) == 'kombu_couchdb.documents'}
    pure |= {f'kombu_couchdb.{name}' for name in ('options', 'values', 'fleet.attention')}
    for module in pure - {'kombu_couchdb.documents.body'}:  # this module uses the codecs of kombu
        assert not tops(module) & OUTSIDE, module
    assert not tops('kombu_couchdb.errors') & OUTSIDE


def test_consumer_imports_only_helpers_of_kombu() -> None:
    for module in FILES:
        if folder_of(module).partition('.')[2] in ('consumer', 'fleet', 'leases', 'queues', 'couchdb'):
            found = {name for name in imports_of(module) if name.partition('.')[0] == 'kombu'}
            assert found <= {
                'kombu.utils.compat',
                'kombu.utils.functional',
                'kombu.utils.imports',
                'kombu.utils.json',
                'kombu.utils.url',
            }, module


def test_transport_is_imported_only_by_its_folder_and_rooms() -> None:
    inside = {module for module in FILES if folder_of(module) == 'kombu_couchdb.transport'}
    outside = {module for module in FILES if folder_of(module) not in {'kombu_couchdb.transport', *ROOMS}}
    assert {name for module in outside for name in imports_of(module) if name in inside} == {'kombu_couchdb.transport'}


def test_no_room_is_imported_by_the_core() -> None:
    core = {module for module in FILES if folder_of(module) not in ROOMS}
    found = {(module, name) for module in core for name in imports_of(module) if folder_of(name) in ROOMS}
    assert not {(module, name) for module, name in found if name != 'kombu_couchdb.embedded'}


@pytest.mark.parametrize(
    ('imported', 'by'),
    [
        (('requests', 'urllib3'), r'kombu_couchdb\.(transport\.connection|couchdb\.\w+)'),
        (('kombu.transport',), r'kombu_couchdb\.(transport\.\w+|registration)|celery_couchdb\.patches'),
        (('click',), r'celery_couchdb(\.\w+)*\.cli(\.\w+)*'),
    ],
)
def test_only_some_modules_import(imported: tuple[str, ...], by: str) -> None:
    found = {module for module in FILES if any(name.startswith(imported) for name in imports_of(module))}
    assert found
    assert not [module for module in found if not re.fullmatch(by, module)]


def test_one_module_prints_and_one_creates_loggers() -> None:
    """These two modules escape text from documents before it reaches a terminal or a log."""
    sources = {module: path.read_text('utf-8') for module, path in FILES.items()}
    printing = r'\bclick\.(echo|secho|confirm)\('
    assert {module for module, text in sources.items() if re.search(printing, text)} == {'celery_couchdb.cli.tables'}
    bare = {module for module, text in sources.items() if re.search(r'\bprint\(', text)}
    assert bare <= {'kombu_couchdb.embedded.__main__', 'kombu_couchdb.embedded'}
    making = r'\bkombu\.log\b|\bgetLogger\('
    assert {module for module, text in sources.items() if re.search(making, text)} <= {
        'kombu_couchdb.log',
        'kombu_couchdb.embedded',
        'celery_couchdb.patches.output',
    }  # the last two log no text of documents


def test_one_module_closes_things_at_the_end_of_their_life() -> None:
    """What closes something by itself, without a call, must not do that in a forked child: see `fork_safety`."""
    closing = r'\batexit\.\w|\bweakref\.finalize\(|\b__del__\b|\bFinalize\('
    assert {module for module, path in FILES.items() if re.search(closing, path.read_text('utf-8'))} == {
        'kombu_couchdb.couchdb.fork_safety'
    }


def test_workers_import_neither_commands_nor_admin() -> None:
    ours = {module for module in FILES if not module.startswith(OPERATORS)}
    assert not {found for module in ours for found in imports_of(module) if found.startswith(OPERATORS)}


def test_no_file_is_too_long() -> None:
    assert not [module for module, path in FILES.items() if len(path.read_text('utf-8').splitlines()) > 600]
