"""Alerts, dashboard and KEDA's query in `examples/deployment`, and the documentation's table, name real metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip('prometheus_client')

from celery_couchdb.contrib.metrics.exporter import Exporter, Scrape
from kombu_couchdb.admin.status import Status

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / 'examples/deployment'

#: A status in which every metric has a value.
STATUS: Status = {
    'server': {'url': '', 'version': '', 'vendor': '', 'embedded': False},
    'queues': {
        'celery': {
            'ready': 1,
            'scheduled': 1,
            'parked': 1,
            'prefetched': 1,
            'running': 1,
            'dead': 1,
            'oldest': 1.0,
            'rate': 1.0,
            'paused': None,
            'temporary': False,
        }
    },
    'malformed': 0,
    'consumers': [
        {
            'id': 'a',
            'name': 'w1@host',
            'host': 'host',
            'pid': 1,
            'queues': ['celery'],
            'heartbeat': 1.0,
            'rate': 1.0,
            'alive': True,
            'running': [{'id': '1', 'task': 'pay', 'queue': 'celery', 'since': 1.0}],
            'tasks': {'since': 1.0, 'counts': {'pay': {'failed': 1, 'run': {'0.5': 1}, 'waited': {'0.5': 1}}}},
            'pool': {},
            'prefetched': 0,
            'leads': [],
        }
    ],
    'leaders': [{'duty': 'beat:default', 'name': 'beat@host', 'holder': 'host', 'renewed': 1.0, 'alive': True}],
    'database': {'name': '', 'documents': 1, 'tombstones': 1, 'size': 1, 'active': 1},
    'broadcasts': None,
    'results': None,
}


def exported() -> dict[str, list[dict[str, str]]]:
    """Return the labels of all samples, by name."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in Exporter(lambda: Scrape(STATUS, 0.0), (), timeout=60.0, keep=0.0).collect():
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((FOLDER / 'celery-alerts.yaml').read_text('utf-8'))['groups']
    return list(group['rules'])


DASHBOARD = json.loads((FOLDER / 'grafana-dashboard.json').read_text('utf-8'))
KEDA = yaml.safe_load((FOLDER / 'keda.yaml').read_text('utf-8'))


def queries() -> Iterator[tuple[str, str]]:
    """Yield each query of the examples with its place."""
    for rule in rules():
        yield rule['alert'], rule['expr']
    for panel in DASHBOARD['panels']:
        for target in panel['targets']:
            yield f'{panel["title"]} {target["refId"]}', target['expr']
    yield 'keda', KEDA['spec']['triggers'][0]['metadata']['query']


@pytest.mark.parametrize(('place', 'query'), [pytest.param(*one, id=one[0]) for one in queries()])
def test_query_selects_something(place: str, query: str) -> None:
    """Each selector matches an exported sample, but for variables of Grafana."""
    if find_spec('promql_parser'):
        import_module('promql_parser').parse(query)
    selectors = re.findall(r'\b(celery_\w+)(?:\{(.*?)\})?', query)
    assert selectors
    for name, matchers in selectors:
        wanted = re.findall(r'(\w+)(=~?)"(.*?)"', matchers)
        assert ', '.join(f'{label}{sign}"{value}"' for label, sign, value in wanted) == matchers
        for labels in exported()[name]:
            known = {'instance': '', **labels}
            if all(value.startswith('$') or re.fullmatch(value, known[label]) for label, _, value in wanted):
                break
        else:
            pytest.fail(f'{name}{{{matchers}}} selects nothing')
    for label in re.findall(r'(?:by|ignoring) \((\w+)\)', query):
        assert all(label in labels for name, _ in selectors[:1] for labels in exported()[name])


#: For each alert, series with a value, or a number that is added each minute, at which it fires, and one at which not.
FIRING: dict[str, dict[str, tuple[float | str, float | str]]] = {
    'CeleryCouchDBDown': {'celery_couchdb_up': (0, 1)},
    'CeleryMessagesWait': {'celery_couchdb_queue_oldest_seconds{queue="q"}': (301, 299)},
    'CeleryNoConsumer': {
        'celery_couchdb_queue_messages{queue="q", state="ready"}': (1, 1),
        'celery_couchdb_queue_consumers{queue="q"}': (0, 1),
    },
    'CeleryWorkersStuck': {
        'celery_couchdb_queue_messages{queue="q", state="running"}': (2, 2),
        'celery_couchdb_queue_acknowledged_per_second{queue="q"}': (0, 0.1),
    },
    'CeleryDeadLetters': {'celery_couchdb_queue_messages{queue="q", state="dead"}': ('0+1', '5+0')},
    'CeleryTasksFail': {
        'celery_couchdb_tasks_total{task="pay", state="failed", worker="w"}': ('0+6', '0+4'),
        'celery_couchdb_tasks_total{task="pay", state="succeeded", worker="w"}': ('0+94', '0+96'),
    },
    'CeleryMalformedMessages': {'celery_couchdb_malformed_messages': (1, 0)},
    'CeleryConsumersOverdue': {'celery_couchdb_consumers{state="overdue"}': (1, 0)},
    'CeleryNoLeader': {'celery_couchdb_leader_renewed_seconds{duty="beat"}': (61, 20)},
    'CeleryTombstones': {'celery_couchdb_database_tombstones{database="d", role="broker"}': (6e6, 4e6)},
    'CeleryDatabaseNotCompacted': {
        'celery_couchdb_database_size_bytes{database="d", role="broker"}': (2e9, 2e9),
        'celery_couchdb_database_active_bytes{database="d", role="broker"}': (1e8, 1e9),
    },
}


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    tool = shutil.which('promtool') or pytest.skip('needs promtool (package prometheus)')
    bare = [{**rule, 'annotations': {}} for rule in rules()]  # promtool would compare the texts
    (tmp_path / 'rules.yaml').write_text(yaml.safe_dump({'groups': [{'name': 'bare', 'rules': bare}]}))
    severity = {rule['alert']: rule['labels']['severity'] for rule in rules()}

    def test(alert: str, series: dict[str, str], *firing: dict[str, str]) -> dict[str, Any]:
        expected = [{'exp_labels': {'severity': severity[alert], **labels}} for labels in firing]
        return {
            'interval': '1m',
            'input_series': [{'series': name, 'values': values} for name, values in series.items()],
            'alert_rule_test': [{'eval_time': '8h', 'alertname': alert, 'exp_alerts': expected}],
        }

    growing = 'celery_couchdb_queue_messages{queue="q", state="ready"}'
    tests = [
        test('CeleryMetricsMissing', {}, {}),
        test('CeleryMetricsMissing', {'celery_couchdb_up': '0x600'}),
        test('CeleryQueueGrows', {growing: '1001+1x600'}, {'queue': 'q', 'state': 'ready'}),
        test('CeleryQueueGrows', {growing: '5000-1x600'}),
    ]
    for alert, series in FIRING.items():
        labels = dict(re.findall(r'(\w+)="(\w+)"', next(iter(series))))
        if alert == 'CeleryTasksFail':
            labels = {'task': labels['task']}
        tests.append(test(alert, {name: f'{bad}x600' for name, (bad, _) in series.items()}, labels))
        tests.append(test(alert, {name: f'{good}x600' for name, (_, good) in series.items()}))
    assert {one['alert_rule_test'][0]['alertname'] for one in tests} == severity.keys()
    (tmp_path / 'tests.yaml').write_text(yaml.safe_dump({'rule_files': ['rules.yaml'], 'tests': tests}))
    subprocess.run([tool, 'test', 'rules', 'tests.yaml'], cwd=tmp_path, check=True)


def test_dashboard_has_all_metrics_of_queues_and_databases() -> None:
    shown = set(re.findall(r'celery_\w+', str([panel['targets'] for panel in DASHBOARD['panels']])))
    assert exported().keys() - shown == {'celery_couchdb_server_info'}
    assert set(re.findall(r'celery_\w+', str(DASHBOARD['templating']['list']))) <= exported().keys()


def test_documentation_lists_all_metrics() -> None:
    page = (ROOT / 'docs/production/monitoring.rst').read_text('utf-8')
    listed = dict(re.findall(r'^``(celery_couchdb_\w+)(?:\{([\w, ]+)\})?``\s', page, re.MULTILINE))
    assert listed == {name: ', '.join(sorted(samples[0])) for name, samples in exported().items()}
