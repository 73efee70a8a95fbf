"""`celery couchdb metrics` without CouchDB: metrics of a status, shared readings, arguments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from celery_couchdb.cli.clients import result_of, start
from celery_couchdb.contrib.metrics.cli import command
from celery_couchdb.contrib.metrics.exporter import Exporter, Scrape
from kombu_couchdb.admin.status import ConsumerStatus, DatabaseStatus, QueueStatus, Status
from kombu_couchdb.errors import AccessDenied, ServerUnavailable
from tests.conftest import PATIENCE, wait_for

prometheus_client = pytest.importorskip('prometheus_client')

from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

#: A name with everything that the text format escapes, and with what a terminal obeys.
EVIL = 'a"b\\c\nd\x1b[2J\u202e\ud800é'

Sample = tuple[str, tuple[tuple[str, str], ...]]


def queue(**members: Any) -> QueueStatus:
    return {
        'ready': 0,
        'scheduled': 0,
        'parked': 0,
        'oldest': None,
        'prefetched': 0,
        'running': 0,
        'dead': 0,
        'rate': 0.0,
        'temporary': False,
        'paused': None,
        **members,  # type: ignore[typeddict-item]
    }


def consumer(*queues: str, alive: bool = True) -> ConsumerStatus:
    return {
        'id': 'a',
        'name': 'w1@h',
        'host': 'h',
        'pid': 1,
        'queues': list(queues),
        'heartbeat': 1.0,
        'rate': 0.0,
        'alive': alive,
        'running': [],
        'tasks': {},
        'prefetched': 0,
        'leads': [],
    }


def database(name: str, size: int | None = None) -> DatabaseStatus:
    return {'name': name, 'documents': 5, 'tombstones': size, 'size': size, 'active': size}


def a_status(
    queues: dict[str, QueueStatus], *consumers: ConsumerStatus, results: DatabaseStatus | None = None
) -> Status:
    return {
        'server': {'url': 'http://h:1', 'version': '3.5.0', 'vendor': 'Apache', 'embedded': False},
        'queues': queues,
        'malformed': 3,
        'consumers': list(consumers),
        'leaders': [{'duty': 'beat:shop', 'name': None, 'holder': None, 'renewed': 4.0, 'alive': False}],
        'database': database('broker', 7000),
        'broadcasts': None,
        'results': results,
    }


def exporter(read: Callable[[], Scrape], *queues: str, timeout: float = PATIENCE, keep: float = 0.0) -> Exporter:
    return Exporter(read, queues, timeout, keep)


def samples(registry: CollectorRegistry) -> dict[Sample, float]:
    """Return the samples in the text format, as Prometheus reads it."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        assert family.documentation
        for sample in family.samples:
            key = sample.name.removeprefix('celery_couchdb_'), tuple(sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def of(status: Status, *queues: str) -> dict[Sample, float]:
    return samples(exporter(lambda: Scrape(status, 0.25), *queues).registry)


def test_all_of_a_status_is_exported() -> None:
    found = of(
        a_status(
            {
                'q': queue(ready=26, scheduled=5, parked=4, prefetched=2, running=3, dead=1, oldest=23.5, rate=1.5),
                'empty': queue(paused={'date': None, 'by': None, 'reason': None}),
            },
            consumer('q'),
            consumer('q', 'empty'),
            consumer('q', alive=False),
            results=database('results'),
        )
    )

    def states(name: str, **counts: float) -> dict[Sample, float]:
        return {('queue_messages', (('queue', name), ('state', state))): count for state, count in counts.items()}

    broker = (('database', 'broker'), ('role', 'broker'))
    assert found == {
        ('up', ()): 1,
        ('server_info', (('vendor', 'Apache'), ('version', '3.5.0'))): 1,
        ('reading_seconds', ()): 0.25,
        **states('q', ready=26, scheduled=5, parked=4, prefetched=2, running=3, dead=1),
        **states('empty', ready=0, scheduled=0, parked=0, prefetched=0, running=0, dead=0),
        ('queue_oldest_seconds', (('queue', 'q'),)): 23.5,
        ('queue_oldest_seconds', (('queue', 'empty'),)): 0,
        ('queue_acknowledged_per_second', (('queue', 'q'),)): 1.5,
        ('queue_acknowledged_per_second', (('queue', 'empty'),)): 0,
        ('queue_consumers', (('queue', 'q'),)): 2,
        ('queue_consumers', (('queue', 'empty'),)): 1,
        ('queue_paused', (('queue', 'q'),)): 0,
        ('queue_paused', (('queue', 'empty'),)): 1,
        ('leader_renewed_seconds', (('duty', 'beat:shop'),)): 4,
        ('malformed_messages', ()): 3,
        ('consumers', (('state', 'alive'),)): 2,
        ('consumers', (('state', 'overdue'),)): 1,
        ('database_documents', broker): 5,
        ('database_documents', (('database', 'results'), ('role', 'results'))): 5,
        ('database_tombstones', broker): 7000,
        ('database_size_bytes', broker): 7000,
        ('database_active_bytes', broker): 7000,
    }


def test_temporary_queues_are_exported_only_if_they_are_named() -> None:
    status = a_status({'q': queue(), 'reply': queue(ready=1, temporary=True)})

    def queues(*names: str) -> set[str]:
        return {dict(labels)['queue'] for name, labels in of(status, *names) if name == 'queue_messages'}

    assert queues() == {'q'}
    assert queues('reply', 'not there') == {'reply'}


def test_hostile_names_are_one_label_and_cannot_forge_a_sample() -> None:
    forged = 'q"} 1\ncelery_couchdb_up 0\n'
    found = of(a_status({EVIL: queue(ready=1), forged: queue(ready=2)}))
    names = {dict(labels)['queue']: value for (name, labels), value in found.items() if ('state', 'ready') in labels}
    assert names == {
        'a"b\\c\\nd\\x1b[2J\\u202e\\ud800é': 1,
        'q"} 1\\ncelery_couchdb_up 0\\n': 2,
    }
    assert found['up', ()] == 1


# -- shared readings


class Source:
    """Readings that end when the test says so."""

    def __init__(self) -> None:
        self.made = 0
        self.may_end = threading.Semaphore(0)
        self.error: Exception | None = None

    def __call__(self) -> Scrape:
        self.made += 1
        assert self.may_end.acquire(timeout=PATIENCE)
        if self.error:
            raise self.error
        return Scrape(a_status({}), self.made)


@pytest.fixture
def source() -> Iterator[Source]:
    source = Source()
    yield source
    for _ in range(100):
        source.may_end.release()


def test_scrapes_at_once_share_one_reading(source: Source) -> None:
    shared = exporter(source, keep=1000.0)  # for a thread that begins only when the reading has ended
    scrapes = [start(shared.read) for _ in range(10)]
    wait_for(lambda: source.made, 'the first reading')
    source.may_end.release()
    assert {result_of(scrape, PATIENCE).seconds for scrape in scrapes} == {1}
    assert source.made == 1


@pytest.mark.parametrize(
    ('error', 'keep', 'readings'), [(None, 1000.0, 1), (ServerUnavailable('away'), 1000.0, 1), (None, 0.0, 3)]
)
def test_reading_or_its_error_is_kept(source: Source, error: Exception | None, keep: float, readings: int) -> None:
    source.error, shared = error, exporter(source, keep=keep)
    for _ in range(3):
        source.may_end.release()
        assert samples(shared.registry)['up', ()] == (error is None)
    assert source.made == readings


def test_no_second_reading_begins_while_the_server_does_not_respond(
    source: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = exporter(source, timeout=0.01)
    for _ in range(5):
        assert samples(shared.registry) == {('up', ()): 0}
    assert source.made == 1
    assert capsys.readouterr().err == 'Error: CouchDB has not responded within 0.01 s\n'

    def is_up() -> float:
        source.may_end.release()  # for each reading: one that ends between two scrapes is used by none
        return samples(shared.registry)['up', ()]

    wait_for(is_up, 'the reading')
    assert capsys.readouterr().err == 'CouchDB responds again\n'


def test_outage_is_one_line(source: Source, capsys: pytest.CaptureFixture[str]) -> None:
    shared = exporter(source)
    for error in (None, ServerUnavailable('away\nforged'), AccessDenied('no right'), None, None):
        source.error = error
        source.may_end.release()
        assert samples(shared.registry)['up', ()] == (error is None)
    assert capsys.readouterr().err == 'Error: away\\nforged\nCouchDB responds again\n'


# -- the command


@pytest.mark.parametrize('address', ['', '127.0.0.1', ':70000', '::1:9808', 'h:p', 'h:²'])
def test_address_that_is_none_is_a_usage_error(address: str) -> None:
    done = CliRunner().invoke(command, ['--listen', address])
    assert done.exit_code == 2
    assert 'write host:port, for example 127.0.0.1:9808' in done.stderr


def test_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('celery_couchdb.contrib.metrics.cli.find_spec', lambda name: None)
    done = CliRunner().invoke(command)
    assert (done.exit_code, done.stdout) == (1, '')
    assert done.stderr == (
        "Error: this command needs the package prometheus_client: pip install 'celery-couchdb[metrics]'\n"
    )
