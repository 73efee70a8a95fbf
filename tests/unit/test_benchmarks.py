"""Figures, tables, plot and page of the benchmarks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from queue import Queue
from typing import Any
from xml.etree import ElementTree

import pytest
import requests
from click.testing import CliRunner
from requests.adapters import HTTPAdapter

from benchmarks.__main__ import main
from benchmarks.cases import Case, Figure, NotMeasured, Results, Row
from benchmarks.counting import Count, counting, record, recorded, written
from benchmarks.figures import median_of, number, percentile, ratio, times
from benchmarks.fleet import Fleet
from benchmarks.loops import body_of
from benchmarks.measures import fleet
from benchmarks.plot import lines, plot
from benchmarks.report import Run, inserted, page, write
from benchmarks.run import run
from benchmarks.sizes import SIZES, Fleets
from benchmarks.systems import Place, reachable
from benchmarks.table import simple_table, table_of
from benchmarks.text import in_one_line
from kombu_couchdb.couchdb.bounds import Upload

SPEED = Row('publish', 'one thread', 'messages/s', True)
DELAY = Row('delay', 'idle, p50', 'ms', False)
VALUES = {
    SPEED: {'couchdb': [100.0, 900.0, 200.0], 'raw': [400.0], 'redis': [1000.0, 3000.0]},
    DELAY: {'couchdb': [10.0], 'raw': [], 'redis': [2.5]},
}
SYSTEMS = ['couchdb', 'raw', 'redis']


def fleet_rows() -> dict[Row, dict[str, list[float]]]:
    """The rows of a measure with two figures for 1, 10 and 100 consumers, in the order of the cases."""
    return {
        Row('fleet', f'{at} consumers, {figure}', 'ms', False, point=(figure, at)): {
            'couchdb': [10.0 * at],
            'redis': [2.0],
        }
        for at in (1, 10, 100)
        for figure in ('idle', 'busy')
    }


class Named:
    """A system with nothing but a name, which is all that cases need."""

    def __init__(self, name: str) -> None:
        self.name = name


def a_run(**changes: Any) -> Run:
    given: dict[str, Any] = {
        'day': date(2026, 11, 21),
        'size': 'quick',
        'rounds': 3,
        'versions': {'Python': '3.11', 'CouchDB': '3.5'},
        'systems': {'couchdb': 'ours', 'raw': 'bare', 'redis': 'Redis'},
        'absent': {'rabbitmq': 'not reached'},
        'titles': {'publish': 'Publish', 'delay': 'Delay'},
        **changes,
    }
    return Run(**given)


@pytest.mark.parametrize(('values', 'expected'), [([], None), ([3.0], 3.0), ([9.0, 1.0, 2.0], 2.0), ([1.0, 3.0], 2.0)])
def test_median(values: list[float], expected: float | None) -> None:
    assert median_of(values) == expected


@pytest.mark.parametrize(('share', 'expected'), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_percentile(share: float, expected: float) -> None:
    assert percentile(list(range(100, 0, -1)), share) == expected


def test_a_ratio_needs_two_values_and_no_division_by_zero() -> None:
    assert ratio(6.0, 3.0) == 2.0
    assert ratio(0.0, 3.0) == 0.0
    assert ratio(None, 3.0) is ratio(6.0, None) is ratio(6.0, 0.0) is None


@pytest.mark.parametrize(
    ('value', 'text'),
    [
        (None, '–'),
        (0.0, '0'),
        (0.012345, '0.0123'),
        (1.005, '1.00'),
        (98.76, '98.8'),
        (999.6, '1,000'),
        (1234567.0, '1,230,000'),
    ],
)
def test_a_number_has_three_significant_digits(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ('value', 'text'), [(None, '–'), (0.0, '×0'), (0.456, '×0.46'), (2.0, '×2.0'), (123.0, '×120')]
)
def test_a_ratio_has_two_significant_digits(value: float | None, text: str) -> None:
    assert times(value) == text


def test_a_table_has_medians_and_their_ratios_to_ours_and_to_raw() -> None:
    lines = table_of(VALUES, SYSTEMS).splitlines()
    assert lines[1].split() == ['\\', 'Unit', 'couchdb', 'raw', 'redis']
    assert lines[3].split() == [
        'one',
        'thread',
        'messages/s',
        '200',
        '(×0.50)',
        '400',
        '×2.0',
        '2,000',
        '×10',
        '(×5.0)',
    ]
    assert lines[4].split() == ['idle,', 'p50', 'ms', '10.0', '–', '2.50', '×0.25']


def test_a_simple_table_keeps_its_columns() -> None:
    assert simple_table([['', 'b'], ['long', '']]) == '==== =\n\\    b\n==== =\nlong \\\n==== ='


def test_the_page_names_versions_and_missing_measures() -> None:
    report = page(a_run(), Results(VALUES, {('delay', 'raw'): 'its loop waits for nothing'}))
    assert 'on 2026-11-21' in report
    assert 'Python 3.11, CouchDB 3.5' in report
    assert 'Not measured: rabbitmq: not reached; raw: its loop waits for nothing.' in report
    delays = report.partition('Delay\n-----')[2]
    assert 'redis' in delays
    assert 'raw ' not in delays.partition('Not measured')[0]  # no empty column
    assert '1 round,' in delays


def test_a_page_keeps_what_its_author_wrote(tmp_path: Path) -> None:
    text, image = write(a_run(), Results(VALUES), tmp_path)
    written_first = text.read_text('utf-8')
    assert written_first.startswith('===========\nPerformance\n===========\n')
    text.write_text('Before\n\n' + written_first + '\nAfter\n', 'utf-8')
    write(a_run(size='full'), Results(VALUES), tmp_path)
    again = text.read_text('utf-8')
    assert again == 'Before\n\n' + written_first.replace('*quick*', '*full*') + '\nAfter\n'
    assert '<svg' in image.read_text('utf-8')


def test_a_run_keeps_the_measures_that_it_lacks(tmp_path: Path) -> None:
    both = {'titles': {'publish': 'Publish', 'delay': 'Delay'}}
    [text, _] = write(a_run(**both), Results(VALUES), tmp_path)
    before = text.read_text('utf-8')
    write(a_run(day=date(2026, 12, 1), **both), Results({DELAY: {'couchdb': [99.0]}}), tmp_path)
    after = text.read_text('utf-8')
    publish, delay = after.split('Delay\n-----')
    assert publish == before.split('Delay\n-----')[0]
    assert 'on 2026-12-01' in delay
    assert '99' in delay
    assert after.count('.. image') == after.count('benchmark ends') == 1


def test_a_readme_with_markers_gets_the_headlines(tmp_path: Path) -> None:
    headline = Row('publish', 'one thread', 'messages/s', True, headline=True)
    results = Results({headline: VALUES[SPEED], DELAY: VALUES[DELAY]})
    readme = tmp_path / 'README.rst'
    readme.write_text('Before\n\n' + inserted('', 'old').partition('\n\n')[2] + '\nAfter\n')
    assert write(a_run(), results, tmp_path / 'docs')[-1] == readme
    text = readme.read_text()
    assert text.startswith('Before')
    assert text.endswith('After\n')
    assert 'Publish: one thread' in text
    assert 'idle, p50' not in text
    assert '.. image:: docs/performance.svg' in text
    assert 'idle, p50' in (tmp_path / 'docs' / 'performance.rst').read_text()
    assert 'idle, p50' not in (tmp_path / 'docs' / 'performance.svg').read_text()


def test_a_readme_without_markers_is_unchanged(tmp_path: Path) -> None:
    readme = tmp_path / 'README.rst'
    readme.write_text('Before\n')
    write(a_run(), Results(dict(VALUES)), tmp_path / 'docs')
    assert readme.read_text() == 'Before\n'


def test_a_page_without_markers_gets_the_report_at_its_end() -> None:
    assert inserted('Mine\n', 'report').startswith('Mine\n\n.. benchmark begins')
    assert inserted(inserted('Mine\n', 'old'), 'new') == inserted('Mine\n', 'new')


def test_the_plot_has_a_bar_for_each_median_and_the_longest_bars_are_equal() -> None:
    image = ElementTree.fromstring(plot(VALUES, SYSTEMS, {'publish': 'Publish <it>', 'delay': 'Delay'}))
    space = '{http://www.w3.org/2000/svg}'
    texts = [element.text for element in image.iter(f'{space}text')]
    assert 'Publish <it>' in texts
    assert [text for text in texts if text in SYSTEMS] == ['couchdb', 'raw', 'redis', 'couchdb', 'redis']
    widths = [float(element.attrib['width']) for element in image.iter(f'{space}rect')][1:]
    assert widths[2] == widths[3] == max(widths)
    assert widths[0] == pytest.approx(widths[2] / 10, abs=0.1)
    assert widths[4] == pytest.approx(widths[3] / 4, abs=0.1)


def test_lines_have_a_panel_for_each_figure_and_a_line_for_each_measured_system() -> None:
    image = ElementTree.fromstring(lines(fleet_rows(), SYSTEMS))
    space = '{http://www.w3.org/2000/svg}'
    texts = [element.text for element in image.iter(f'{space}text')]
    assert [text for text in texts if text in ('idle (ms)', 'busy (ms)')] == ['idle (ms)', 'busy (ms)']
    assert texts.count('couchdb 1,000') == texts.count('redis 2.00') == texts.count('100') == 2
    points = [
        [tuple(map(float, point.split(','))) for point in element.attrib['points'].split()]
        for element in image.iter(f'{space}polyline')
    ]
    assert len(points) == 4
    ours, redis = points[:2]
    assert len(ours) == len(redis) == 3
    assert ours[1][0] - ours[0][0] == pytest.approx(ours[2][0] - ours[1][0])  # 1, 10 and 100 are equally far
    assert ours[0][1] > ours[1][1] > ours[2][1]  # a higher value is further up
    assert redis[0][1] == redis[2][1]


def test_a_line_without_values_is_not_drawn() -> None:
    assert '<polyline' not in lines({row: {} for row in fleet_rows()}, SYSTEMS)


def test_the_points_of_a_line_are_together_in_the_table_and_in_a_plot_of_their_own(tmp_path: Path) -> None:
    run = a_run(titles={'publish': 'Publish', 'fleet': 'Fleet', 'delay': 'Delay'})
    folder = tmp_path / 'docs'
    written_paths = write(run, Results({**fleet_rows(), **VALUES}), folder)
    assert [path.name for path in written_paths] == ['performance.rst', 'performance.svg', 'fleet.svg']
    text = (folder / 'performance.rst').read_text('utf-8')
    names = [line.split(' consumers, ')[1].split()[0] for line in text.splitlines() if ' consumers, ' in line]
    assert names == ['idle'] * 3 + ['busy'] * 3
    assert 'consumers' not in (folder / 'performance.svg').read_text('utf-8')
    # A later run without this measure keeps its section with its plot, and a run of this measure alone keeps the bars.
    write(run, Results(dict(VALUES)), folder)
    assert '.. image:: fleet.svg' in (folder / 'performance.rst').read_text('utf-8')
    assert folder / 'performance.svg' not in write(run, Results(fleet_rows()), folder)
    assert '.. image:: performance.svg' in (folder / 'performance.rst').read_text('utf-8')


def test_systems_take_turns_in_each_round() -> None:
    order: list[tuple[str, str]] = []

    def case(label: str, rounds: int | None = None) -> Case:
        def measured(system: Any) -> Sequence[float | None]:
            order.append((label, system.name))
            return [float(len(order)), None]

        return Case('publish', label, (Figure('s'), Figure('s', name='other')), measured, rounds)

    systems: list[Any] = [Named('a'), Named('b')]
    results = Results()
    run([case('x'), case('once', 1)], systems, 2, results, lambda text: None)
    assert order == [('x', 'a'), ('x', 'b'), ('once', 'a'), ('once', 'b'), ('x', 'a'), ('x', 'b')]
    assert results.values[Row('publish', 'x', 's', True)] == {'a': [1.0, 5.0], 'b': [2.0, 6.0]}
    assert results.values[Row('publish', 'x, other', 's', True)] == {'a': [], 'b': []}


def test_a_failure_of_one_system_does_not_affect_the_others() -> None:
    told: list[str] = []

    def measured(system: Any) -> Sequence[float | None]:
        if system.name == 'broken':
            raise ConnectionError('amqp://guest:secret@localhost refused')
        if system.name == 'lacking':
            raise NotMeasured('no such thing')
        return [1.0]

    systems: list[Any] = [Named('broken'), Named('lacking'), Named('fine')]
    results = Results()
    run([Case('publish', 'x', (Figure('s'),), measured)], systems, 1, results, told.append)
    assert results.values[Row('publish', 'x', 's', True)] == {'broken': [], 'lacking': [], 'fine': [1.0]}
    assert results.missing == {
        ('publish', 'broken'): 'failed (ConnectionError: amqp://localhost refused)',
        ('publish', 'lacking'): 'no such thing',
    }
    assert len(told) == 2
    assert 'secret' not in ''.join(told)


def test_an_unreachable_server_is_reported_without_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv('RABBITMQ_URL', 'amqp://guest:secret@127.0.0.1:1//')
    found, absent = reachable(['rabbitmq'])
    assert not found
    assert absent['rabbitmq'].startswith('not reached; set RABBITMQ_URL')
    assert 'secret' not in absent['rabbitmq']


def test_redis_that_syncs_each_write_has_no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv('REDIS_ALWAYS_URL', raising=False)
    assert reachable(['redis-always']) == ({}, {'redis-always': 'REDIS_ALWAYS_URL is not set'})


def test_without_any_server_there_is_one_sentence_and_no_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv('RABBITMQ_URL', 'amqp://guest:secret@127.0.0.1:1//')
    done = CliRunner().invoke(main, ['-s', 'rabbitmq', '--output', str(tmp_path)])
    assert done.exit_code == 1
    assert done.output.splitlines()[-1].startswith('Error: no system can be reached; set COUCHDB_URL')
    assert not list(tmp_path.iterdir())


def test_an_error_is_one_short_line() -> None:
    assert in_one_line(ValueError('a\n b')) == 'ValueError: a b'
    assert len(in_one_line(ValueError('x' * 1000))) == 200


@pytest.mark.parametrize(
    ('method', 'url', 'body', 'expected'),
    [
        ('PUT', 'http://h/db/id', b'{}', 1),
        ('DELETE', 'http://h/db/id?rev=1', None, 1),
        ('GET', 'http://h/db/id', None, 0),
        ('POST', 'http://h/db/_bulk_docs', b'{"docs": [{}, {}]}', 2),
        ('POST', 'http://h/db/_bulk_docs', Upload(b'{"docs": [{}, {}]}', 1.0), 2),
        ('POST', 'http://h/db/_changes?since=0', b'{"docs": [{}]}', 0),
    ],
)
def test_writes_are_counted_and_reads_are_not(
    method: str, url: str, body: bytes | Upload | None, expected: int
) -> None:
    assert written(method, url, body) == expected


def test_a_fleet_counts_a_message_that_is_delivered_again_once() -> None:
    answers: Queue[tuple[int | None, float]] = Queue()
    members = Fleet(Place('memory://', 'fleet'), 1, answers, [])
    for answer in [(None, 0.0), (1, 5.0), (1, 6.0), (2, 4.0), (1, 7.0), (3, 8.0)]:
        answers.put(answer)
    members.settle(0.0)
    assert members.received(2) == [4.0, 5.0]
    assert members.received(1) == [8.0]
    members.close()


@pytest.mark.parametrize('measured', [fleet.situations, fleet.backlog])
def test_fleets_are_measured_over_redis_only(measured: Any) -> None:
    with pytest.raises(NotMeasured, match='over Redis only'):
        measured(1, Fleets(), Named('sqla'))


class Unsent(Exception):
    """A request arrived at the adapter's own `send`."""


@pytest.fixture
def nothing_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(*args: Any, **kwargs: Any) -> None:
        raise Unsent

    monkeypatch.setattr(HTTPAdapter, 'send', send)


def request(method: str, url: str, body: str | None = None) -> None:
    with pytest.raises(Unsent):
        requests.request(method, url, data=body, timeout=1)


@pytest.mark.usefixtures('nothing_sent')
def test_requests_are_counted_by_database() -> None:
    with counting() as all_, counting('one') as one:
        request('GET', 'http://h/one/_changes')
        request('POST', 'http://h/one/_bulk_docs?x=1', '{"docs": [{}, {}]}')
        request('PUT', 'http://h/two/id', '{}')
    request('PUT', 'http://h/one/id', '{}')
    assert (all_, one) == (Count(3, 3), Count(2, 2))


@pytest.mark.usefixtures('nothing_sent')
def test_requests_of_a_process_are_recorded_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / 'requests'
    assert recorded(file) == Count()
    with counting():  # it restores what `record` replaces
        record(file)
        request('GET', 'http://h/one')
        request('POST', 'http://h/one/_bulk_docs', '{"docs": [{}, {}]}')
    assert recorded(file) == Count(2, 2)


@pytest.mark.parametrize('size', [200, 2000, 100_000])
def test_a_body_has_its_size_and_is_always_the_same(size: int) -> None:
    assert len(json.dumps(body_of(size))) == size
    assert body_of(size) == body_of(size)


@pytest.mark.parametrize('size', SIZES.values(), ids=list(SIZES))
def test_no_load_takes_more_than_its_backlog(size: Any) -> None:
    assert all(load.take <= load.backlog and load.backlog % load.consumers == 0 for load in size.loads)
