"""The page of tasks: how often each ran and failed in the last hour or day, how long it took, and a chart of all."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple

from starlette.responses import Response

from ...resources.columns import NO_VALUE, Cell, Column, Row, Tone, count_cell, format_mean
from ...web.recent_history import DAY, MINUTE, RecentHours
from ...web.tables import Table
from ...web.view import Page, View
from .history import ENDS

#: The periods that users choose from: by parameter of the URL, the words, how many steps their charts have, how long
#: these are, in seconds, and that in words.
_PERIODS = {'hour': ('Last hour', 60, MINUTE, 'minute'), 'day': ('Last 24 hours', 48, DAY / 48, '30 minutes')}

#: The height of the large chart, and the least height of what is not 0.
_HEIGHT, _MIN_HEIGHT = 120.0, 3.0

#: From this share on, failures are more than a warning.
_BAD_SHARE = 0.05

#: The most tasks that are shown.
_LIMIT = 200

_EMPTY = (
    'No task has ended in the last 24 hours, as far as the history tells. One of the workers writes it once a minute '
    '(the transport option task_history, on by default): start a worker, and look again a few minutes after it '
    'has run a task.'
)


class Bar(NamedTuple):
    """One bar of the large chart: what it says, and where its two parts begin and how high they are."""

    text: str
    failed: tuple[float, float]
    succeeded: tuple[float, float]


#: What ended of each task in each step of a period, the first one first.
_Steps = Mapping[str, Sequence[Counter[str]]]


def show(view: View) -> Response:
    """Show the tasks of the last hour, or day."""
    recent = view.history()
    steps = {name: _steps(recent, name) for name in _PERIODS}
    rows = _rows(steps)
    if view.wants_json:
        return view.json(rows)
    period = view.param('period') if view.param('period') in _PERIODS else 'hour'
    title, count, seconds, step = _PERIODS[period]
    ended: list[Row] = [
        {'date': recent.end - seconds * (count - at), **_numbers(found[at] for found in steps[period].values())}
        for at in range(count)
    ]
    top = _top(max(row['succeeded'] + row['failed'] for row in ended))
    return view.render(
        'tasks.html',
        numbers=_totals([row[period] for row in rows]) if rows else (),
        title=title,
        step=step,
        bars=_bars(ended, top),
        dates=[row['date'] for row in ended[:: count // 3]] + [recent.end],
        axis=(top, top // 2, 0) if top > 1 else (top, 0),
        periods=[(title, view.link(page.path, period=name), name == period) for name, (title, *_) in _PERIODS.items()],
        table=_table(view, steps[period], rows[:_LIMIT], period, len(rows) - _LIMIT),
        ended=Table.of(
            f'Tasks in each {step}',
            _ENDED_COLUMNS,
            ended[::-1],
            lambda row: row['date'],
            dates={'FROM': lambda row: [row['date']]},
        ),
    )


def _rows(steps: Mapping[str, _Steps]) -> list[Row]:
    """Return what ended of each task in each period, those with most failures first, as objects for JSON."""
    tasks = {task for found in steps.values() for task in found}
    rows = [{'task': task, **{name: _row(steps[name].get(task, ())) for name in _PERIODS}} for task in tasks]
    return sorted(
        rows, key=lambda row: [*(-row[name]['failed'] for name in _PERIODS), -row['day']['runs'], row['task']]
    )


def _steps(recent: RecentHours, period: str) -> _Steps:
    _, count, seconds, _ = _PERIODS[period]
    found = defaultdict[str, list[Counter[str]]](lambda: [Counter() for _ in range(count)])
    for minute in recent.minutes:
        if (at := recent.step(minute, seconds, count)) is not None:
            for task, numbers in minute['tasks'].items():
                found[task][at].update(numbers)
    return found


def _numbers(counts: Iterable[Counter[str]]) -> dict[str, int]:
    """Return how many runs ended, by outcome."""
    found = [*counts]
    return {name: int(sum(each[name] for each in found)) for name in ENDS}


def _row(counts: Sequence[Counter[str]]) -> Row:
    """Return the numbers of a task: how many runs ended, by outcome, and how many seconds a run took on average."""
    numbers = _numbers(counts)
    runs, ended = sum(numbers.values()), numbers['succeeded'] + numbers['failed']
    return {
        'runs': runs,
        **numbers,
        'failure_rate': round(numbers['failed'] / ended, 6) if ended else None,
        'mean': round(sum(each['seconds'] for each in counts) / runs, 3) if runs else None,
    }


# -- the table


def _columns(period: str) -> list[Column]:
    def column(title: str, member: str, form: Callable[[Any], Cell | str], chart: str = '') -> Column:
        return Column(title, None, lambda row: form(row[period][member]), right=not chart)

    return [
        Column('TASK', 'task', min_width=10),
        column('RUNS', 'runs', count_cell),
        column('SUCCEEDED', 'succeeded', count_cell),
        column('FAILED', 'failed', partial(count_cell, tone='bad')),
        column('RETRIED', 'retried', partial(count_cell, tone='warning')),
        column('REJECTED', 'rejected', partial(count_cell, tone='warning')),
        column('FAILURE RATE', 'failure_rate', share_cell),
        column('MEAN TIME', 'mean', format_mean),
        column('TREND', 'runs', _in_words('runs'), 'chart'),
        column('FAILURE TREND', 'failed', _in_words('failures'), 'chart'),
    ]


def _in_words(noun: str) -> Callable[[int], str]:
    return lambda count: f'{count:,} {noun}' if count else NO_VALUE


def share_cell(share: float | None) -> Cell:
    """Return a cell with a share of failures in percent; from 5 % on it is bad."""
    if not share:
        return Cell(NO_VALUE if share is None else '0 %', 'dim')
    tone: Tone = 'bad' if share >= _BAD_SHARE else 'warning'
    return Cell('<0.1 %' if share < 0.001 else f'{100 * share:.1f} %', tone)


def _table(view: View, steps: _Steps, rows: Sequence[Row], period: str, left_out: int) -> Table:
    def chart(of: Sequence[str], row: Row) -> Sequence[float] | None:
        found = [sum(counts[name] for name in of) for counts in steps.get(row['task'], ())]
        return found if any(found) else None

    return Table.of(
        'Tasks',
        _columns(period),
        rows,
        lambda row: row['task'],
        links={
            'TASK': lambda row: view.link('/jobs', task=row['task']),
            'FAILED': lambda row: view.link('/failures', task=row['task']) if row[period]['failed'] else None,
        },
        charts={'TREND': partial(chart, ENDS), 'FAILURE TREND': partial(chart, ['failed'])},
        empty=_EMPTY,
        more=f'These are the first {_LIMIT}; there are {left_out:,} more.' if left_out > 0 else '',
    )


def _totals(rows: Sequence[Row]) -> list[tuple[str, str, Tone]]:
    """Return the sums of all tasks, for the numbers above the chart."""
    sums = {name: sum(row[name] for row in rows) for name in ENDS}
    ended = sums['succeeded'] + sums['failed']
    tones: Mapping[str, Tone] = {'failed': 'bad', 'retried': 'warning', 'rejected': 'warning'}
    cells = {
        **{name.capitalize(): count_cell(sums[name], tones.get(name, '')) for name in ENDS},
        'Failure rate': share_cell(sums['failed'] / ended if ended else None),
    }
    return [(title, cell.text, cell.tone) for title, cell in cells.items()]


# -- the chart

_ENDED_COLUMNS = (
    Column('FROM', 'date'),
    *(Column(name.upper(), name, count_cell, right=True) for name in ENDS),
)


def _top(most: int) -> int:
    """Return the number at the top of the axis: the next one of 1, 2, 4, 6, 8 and 10 times a power of ten."""
    unit = int('1' + '0' * (len(str(most)) - 1))
    return next(step * unit for step in (1, 2, 4, 6, 8, 10) if step * unit >= most)


def _bars(rows: Sequence[Row], top: int) -> list[Bar]:
    """Return the bars: the failed tasks at the bottom, where they can be compared, and the others on top of them."""
    scale = _HEIGHT / top

    def height(count: int, most: float) -> float:
        return round(min(most, max(_MIN_HEIGHT, count * scale)), 1) if count else 0.0

    bars = []
    for row in rows:
        failed = height(row['failed'], _HEIGHT)
        succeeded = height(row['succeeded'], _HEIGHT - failed)
        date = datetime.fromtimestamp(row['date'], timezone.utc)
        text = f'From {date:%H:%M} UTC: {row["succeeded"]:,} succeeded, {row["failed"]:,} failed'
        bars.append(Bar(text, (_HEIGHT - failed, failed), (round(_HEIGHT - failed - succeeded, 1), succeeded)))
    return bars


page = Page('/tasks', 'Tasks', show, noun='task')
