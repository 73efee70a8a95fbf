"""The files in `examples/deployment`: they can be parsed, and their commands, options and variables exist."""

from __future__ import annotations

import configparser
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest
import yaml
from celery.bin.celery import celery as program

from celery_couchdb.cli import couchdb, status

FOLDER = Path(__file__).parents[2] / 'examples/deployment'


def text(name: str) -> str:
    return (FOLDER / name).read_text('utf-8')


def ini(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, delimiters='=', strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text(name))
    return parser


def env(name: str) -> dict[str, str]:
    return dict(line.split('=', 1) for line in text(name).splitlines() if line and not line.startswith('#'))


COMPOSE = yaml.safe_load(text('compose.yaml'))
KUBERNETES = {doc['kind']: doc for doc in yaml.safe_load_all(text('kubernetes.yaml'))}
UNITS = {name: ini(f'shop-{name}.service') for name in ('worker', 'beat', 'metrics', 'vacuum')}
VACUUM = yaml.safe_load(text('kubernetes-vacuum.yaml'))
METRICS = {doc['kind']: doc for doc in yaml.safe_load_all(text('kubernetes-metrics.yaml'))}
CONTAINERS = {kind: KUBERNETES[kind]['spec']['template']['spec'] for kind in ('Job', 'Deployment')}
CONTAINERS['metrics'] = METRICS['Deployment']['spec']['template']['spec']
CONTAINERS['vacuum'] = VACUUM['spec']['jobTemplate']['spec']['template']['spec']


def commands() -> Iterator[list[str]]:
    """Yield each command that starts a program of Celery, as a list of words."""
    run = re.search(r'^CMD (\[.*\])$', text('Dockerfile').replace('\\\n', ''), re.MULTILINE)
    assert run is not None
    yield json.loads(run[1])
    for unit in UNITS.values():
        yield shlex.split(unit['Service']['ExecStart'].replace('\\\n', ' ').replace('%%', '%'))
    yield COMPOSE['services']['metrics']['command']
    yield CONTAINERS['metrics']['containers'][0]['command']
    yield CONTAINERS['vacuum']['containers'][0]['command']
    yield CONTAINERS['Deployment']['containers'][0]['command']
    yield from probes()
    for shell in (COMPOSE['services']['prepare']['command'], CONTAINERS['Job']['containers'][0]['command']):
        assert shell[:2] == ['sh', '-c']
        yield from (shlex.split(part) for part in shell[2].split('&&') if 'celery' in part)


def probes() -> list[list[str]]:
    """Return the commands by which Docker and Kubernetes check a worker."""
    exec_, *words = COMPOSE['services']['worker']['healthcheck']['test']
    assert exec_ == 'CMD'
    return [words, CONTAINERS['Deployment']['containers'][0]['readinessProbe']['exec']['command']]


@pytest.mark.parametrize('words', list(commands()), ids=' '.join)
def test_commands_have_only_options_that_exist(words: list[str]) -> None:
    assert Path(words[0]).name == 'celery'
    assert words[1:3] == ['-A', 'shop']
    command: click.Command = program
    rest = words[3:]
    while rest and not rest[0].startswith('-'):
        name = rest.pop(0)
        if command is couchdb or name != 'couchdb':
            assert isinstance(command, click.Group)
            found = command.get_command(click.Context(command), name)
            assert found is not None
            command = found
        else:
            command = couchdb
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in rest if word.startswith('-')} <= known


def test_probes_name_the_worker_and_wait_longer_than_the_check() -> None:
    [image, *_] = commands()
    for words in probes():
        assert words[words.index('--worker') + 1] == image[image.index('--hostname') + 1]
        [default] = [float(str(option.default)) for option in status.check_command.params if option.name == 'timeout']
        assert default + 5 < CONTAINERS['Deployment']['containers'][0]['readinessProbe']['timeoutSeconds']
        assert default + 5 < int(COMPOSE['services']['worker']['healthcheck']['timeout'].rstrip('s'))
    # A liveness probe that asks CouchDB would restart all workers in an outage.
    assert 'livenessProbe' not in CONTAINERS['Deployment']['containers'][0]


@pytest.mark.parametrize('name', UNITS)
def test_systemd_reads_the_unit(name: str, tmp_path: Path) -> None:
    if not shutil.which('systemd-analyze'):
        pytest.skip('needs systemd-analyze (package systemd)')
    unit = tmp_path / f'shop-{name}.service'
    unit.write_text(text(unit.name).replace('/srv/shop/.venv/bin/celery', '/bin/true'))
    done = subprocess.run(
        ['systemd-analyze', 'verify', '--man=no', str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if unit.name in line]) == (0, [])


def test_docker_reads_the_compose_file() -> None:
    tool = shutil.which('check-jsonschema') or pytest.skip('needs check-jsonschema')
    subprocess.run([tool, '--builtin-schema', 'vendor.compose-spec', str(FOLDER / 'compose.yaml')], check=True)


@pytest.mark.parametrize('name', ['kubernetes.yaml', 'kubernetes-metrics.yaml', 'kubernetes-vacuum.yaml'])
def test_kubernetes_reads_the_manifests(name: str) -> None:
    tool = shutil.which('kubernetes-validate') or pytest.skip('needs kubernetes-validate')
    subprocess.run([tool, '--strict', str(FOLDER / name)], check=True)


def test_app_takes_all_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in env('cluster.env').items():
        monkeypatch.setenv(name, value)
    app = load('shop').app
    assert app.conf.broker_url == env('cluster.env')['CELERY_BROKER_URL']
    assert app.conf.result_backend == env('cluster.env')['CELERY_RESULT_BACKEND']
    assert app.connection_for_write().alt == app.conf.broker_url.split(';')
    assert app.conf.task_acks_late
    for options in (app.conf.broker_transport_options, app.conf.result_backend_transport_options):
        assert options == {'credentials': 'environment'}


def test_managers_wait_for_running_tasks() -> None:
    """The pool of a worker must not get SIGTERM: its processes would end in the middle of their tasks."""
    assert (UNITS['worker']['Service']['KillMode'], UNITS['worker']['Service']['KillSignal']) == ('mixed', 'SIGTERM')
    assert int(UNITS['worker']['Service']['TimeoutStopSec']) == 330
    assert COMPOSE['services']['worker']['stop_grace_period'] == '330s'
    assert CONTAINERS['Deployment']['terminationGracePeriodSeconds'] == 330


def load(name: str) -> ModuleType:
    """Import a file of the folder under a name of its own."""
    spec = importlib.util.spec_from_file_location(f'deployment_{name}', FOLDER / f'{name}.py')
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
