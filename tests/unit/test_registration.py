"""The entry points through which kombu and Celery find these packages, and the modules that they load."""

from __future__ import annotations

from configparser import ConfigParser

from tests.support import ROOT, run_python


def test_import_is_fast_and_registers_both_schemes() -> None:
    done = run_python(
        'import sys, kombu_couchdb; from kombu.transport import TRANSPORT_ALIASES as known; '
        'print(known["couchdb"], known["couchdbs"]); '
        'print(*sorted(n for n in sys.modules if n.partition(".")[0] in ("requests", "kombu_couchdb", "celery")))'
    )
    known, loaded = done.stdout.splitlines()
    assert known.count('function use') == 2
    assert loaded.split() == ['kombu_couchdb', 'kombu_couchdb.registration']


def test_both_packages_are_found_through_entry_points() -> None:
    setup = ConfigParser()
    setup.read(ROOT / 'setup.cfg', 'utf-8')
    assert {
        (group, line.partition('=')[0].strip())
        for group, lines in setup['options.entry_points'].items()
        for line in lines.strip().splitlines()
    } >= {
        ('kombu.serializers', 'couchdb'),
        ('celery.result_backends', 'couchdb'),
        ('celery.result_backends', 'couchdbs'),
    }


#: Prints what belongs to our packages in the modules and classes of Celery and kombu, in the loggers, and in `sys`.
SHOW_CHANGES = """
def is_ours(value):
    owner = getattr(value, '__globals__', {}).get('__name__') or type(value).__module__
    return owner.partition('.')[0] in ('kombu_couchdb', 'celery_couchdb')

def changes():
    theirs = [module for name, module in sys.modules.items() if name.partition('.')[0] in ('celery', 'kombu')]
    classes = {value for module in theirs for value in vars(module).values() if isinstance(value, type)}
    for holder in [*theirs, *classes, sys]:
        for name, value in list(vars(holder).items()):
            if is_ours(value) and not isinstance(value, click.Command):
                yield f'{holder.__name__}.{name}'
    for name, command in control.Panel.data.items():
        if is_ours(command):
            yield f'Panel.{name}'
    for name, logger in logging.root.manager.loggerDict.items():
        if any(map(is_ours, getattr(logger, 'filters', ()))):
            yield f'logger {name}'

print(*sorted(set(changes())))
"""

#: A program that does much of what a client, the `celery` program and a worker do.
PROGRAM = """
import itertools, logging, sys
import celery.bin.celery, celery_couchdb.cli, click
from celery import Celery, canvas, group, signals
from celery.worker import consumer, control
app = Celery('shop', broker='{broker}', backend='{backend}', set_as_current=True)
app.conf.task_publish_retry = False
@app.task(name='add')
def add(left, right):
    return left + right
try:
    group(add.s(1, 1), add.s(2, 2)).apply_async(retry=False)
except Exception as exc:
    print(type(exc).__module__, file=sys.stderr)
app.bugreport()
assert 'celery_couchdb.worker.control' not in sys.modules  # only workers need it
app.app, app.hostname = app, 'worker'
signals.worker_init.send(sender=app)
"""


def changed_by(broker: str, backend: str = 'cache+memory://') -> set[str]:
    done = run_python(PROGRAM.format(broker=broker, backend=backend) + SHOW_CHANGES)
    return set(done.stdout.split('\n')[-2].split())


def test_process_without_couchdb_is_unchanged() -> None:
    """But for the aliases, and the check of our URLs, which kombu parses before it asks for an alias."""
    assert changed_by('memory://') == {'kombu.connection.urlparse', 'kombu.utils.url.urlparse'}


def test_process_with_couchdb_is_changed() -> None:
    """So the test above looks at the right places. No server listens at this port."""
    both = {'celery.canvas.itertools', 'kombu.utils.url.sanitize_url', 'sys.excepthook', 'WorkController._process_task'}
    assert changed_by('couchdb://127.0.0.1:1') >= {*both, 'Panel.scheduled'}
    backend = {*both, 'AsyncResult._maybe_reraise_parent_error'}
    assert changed_by('memory://', 'couchdb://127.0.0.1:1') >= backend
