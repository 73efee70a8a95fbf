"""The entry points through which kombu and Celery find these packages, and the modules that they load."""

from __future__ import annotations

import importlib
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

from tests.conftest import PATIENCE

ROOT = Path(__file__).parents[2]


def entry_points() -> list[tuple[str, str, str]]:
    setup = ConfigParser()
    setup.read(ROOT / 'setup.cfg', 'utf-8')
    return [
        (group, *(part.strip() for part in line.split('=')))  # type: ignore[misc]
        for group, lines in setup['options.entry_points'].items()
        for line in lines.strip().splitlines()
    ]


def test_import_is_fast_and_registers_both_schemes() -> None:
    code = (
        'import sys, kombu_couchdb; from kombu.transport import TRANSPORT_ALIASES as known; '
        'print(known["couchdb"], known["couchdbs"]); '
        'print(*sorted(n for n in sys.modules if n.partition(".")[0] in ("requests", "kombu_couchdb", "celery")))'
    )
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    known, loaded = done.stdout.splitlines()
    assert known.split() == ['kombu_couchdb.transport:Transport'] * 2
    assert loaded.split() == [
        'kombu_couchdb',
        'kombu_couchdb.registration',
    ]


def test_registered_transport_exists() -> None:
    from kombu.transport import resolve_transport

    import kombu_couchdb  # noqa: F401
    from kombu_couchdb.transport import Transport

    assert resolve_transport('couchdb') is resolve_transport('couchdbs') is Transport


@pytest.mark.parametrize(('group', 'name', 'target'), entry_points())
def test_each_entry_point_resolves(group: str, name: str, target: str) -> None:
    module, _, attribute = target.partition(':')
    assert getattr(importlib.import_module(module), attribute) is not None


def test_both_packages_are_found_through_entry_points() -> None:
    assert {(group, name) for group, name, _ in entry_points()} >= {
        ('kombu.serializers', 'couchdb'),
        ('celery.result_backends', 'couchdb'),
        ('celery.result_backends', 'couchdbs'),
    }


def test_hook_is_a_serializer_without_a_codec() -> None:
    from kombu.serialization import SerializerRegistry

    from kombu_couchdb import hook

    registry = SerializerRegistry()
    registry.register('couchdb', *hook)
    assert registry.name_to_type == {'couchdb': 'application/x-celery-couchdb'}
    assert 'couchdb' not in registry._encoders
    assert 'application/x-celery-couchdb' not in registry._decoders


@pytest.mark.parametrize(
    ('before', 'start'),
    [
        ('import celery_couchdb.cli', 'signals.worker_init.send(sender=None)'),
        (
            # No server listens at this port.
            "app = Celery(broker='memory://', backend='couchdb://127.0.0.1:1'); app.backend",
            'app.app = app; signals.worker_ready.send(sender=app); app.backend.sweeper.stop()',
        ),
    ],
    ids=['the program', 'the result backend'],
)
def test_only_workers_load_the_remote_control_command(before: str, start: str) -> None:
    code = (
        'import sys; from celery import Celery, signals; '
        f'{before}; print("celery_couchdb.worker.control" in sys.modules); {start}; '
        'from celery.worker.control import Panel; print(Panel.data["scheduled"].__module__)'
    )
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert done.stdout.split() == ['False', 'celery_couchdb.worker.control']


def test_app_without_couchdb_is_unchanged() -> None:
    code = """
import itertools, sys
from celery import Celery, canvas, group
from celery.app import utils
app = Celery('shop', broker='memory://', backend='cache+memory://')
@app.task(name='add')
def add(left, right):
    return left + right
group(add.s(1, 1), add.s(2, 2)).apply_async()
publish = getattr(app.amqp, '_retry_publish', app.amqp.as_task_v2)  # Celery before 5.7 has no such method
print(canvas.itertools is itertools, publish.__module__, utils.filter_hidden_settings.__module__)
print(*[name for name in sys.modules if name.startswith('celery_couchdb')])
"""
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert done.stdout.splitlines() == [
        'True celery.app.amqp celery.app.utils',
        'celery_couchdb celery_couchdb.patches celery_couchdb.patches.registration',
    ]


def test_versions_agree() -> None:
    import kombu_couchdb

    setup = ConfigParser()
    setup.read(ROOT / 'setup.cfg', 'utf-8')
    assert setup['metadata']['version'] == 'attr: kombu_couchdb.__version__'
    assert all(part.isdigit() for part in kombu_couchdb.__version__.split('.'))
