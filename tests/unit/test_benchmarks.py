"""Figures, tables, plot and page of the benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from tests.benchmarks import ablation, without
from tests.benchmarks.cases import Case, Figure, NotMeasured, Results, Row
from tests.benchmarks.report import Run, write
from tests.benchmarks.run import run

SPEED = Row('publish', 'one thread', 'messages/s', True)
DELAY = Row('delay', 'idle, p50', 'ms', False)
VALUES = {
    SPEED: {'couchdb': [100.0, 900.0, 200.0], 'raw': [400.0], 'redis': [1000.0, 3000.0]},
    DELAY: {'couchdb': [10.0], 'raw': [], 'redis': [2.5]},
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


# -- the ablation


def test_each_mechanism_can_be_switched_off() -> None:
    module = without.__name__
    code = f'from {module} import MECHANISMS\nfor each in MECHANISMS.values(): each.switch_off()'
    subprocess.run([sys.executable, '-c', code], check=True, cwd=Path(__file__).parents[2])
    assert all({*mechanism.cases} <= ablation.CASES.keys() for mechanism in without.MECHANISMS.values())


def test_table_of_the_ablation_shows_what_changes_by_a_tenth(tmp_path: Path) -> None:
    file = tmp_path / 'ablation.jsonl'
    lines = [('', 1.0), ('', 3.0), ('', 2.0), ('bell', 4.0), ('order', 2.1)]
    file.write_text('\n'.join(json.dumps({'without': name, 'figures': {'ms': value}}) for name, value in lines))
    assert ablation.table(file).split() == ['ms', '2.00', 'bell', '+100%']
