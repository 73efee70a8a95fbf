"""The report: a page in reStructuredText with a table for each measure, and plots."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from .cases import Results, Row
from .plot import lines, plot
from .sizes import count
from .systems import TITLES
from .table import simple_table, table_of

__all__ = ['Run', 'inserted', 'page', 'write']

#: The benchmark writes what is between these two lines of a page, and leaves the rest alone.
_BEGIN, _END = '.. benchmark begins: `make bench` writes everything below', '.. benchmark ends'
_PAGE = 'costs.rst'
_PLOT = 'performance.svg'
_BARS = 'The most important figures of the last run as bars'

#: The sections of a report: their titles and texts. The last one ends where the plot of the whole report begins.
_SECTION = re.compile(
    rf'^([^\n]+)\n-{{3,}}\n(.*?)(?=^[^\n]+\n-{{3,}}\n|^\.\. image:: {re.escape(_PLOT)}|\Z)', re.MULTILINE | re.DOTALL
)

EXPLAINED = """\
Each figure is the median of the rounds. In a round the systems take turns on each case. A figure is followed by its
ratio to that of this project (*couchdb*) and, in brackets, to the raw limit (*raw*): the same documents written, read
by a view and deleted by the simplest loop over HTTP, without claims and so without a safe delivery. Publishing returns
when the server has the message: CouchDB, PostgreSQL and *redis-always* have it on the disk then, RabbitMQ has confirmed
it, and *redis* has it in memory. Consuming begins with an open connection and a full queue. A delay is that of one
queue with one consumer; the busy consumer gets 50 other messages a second and works 5 ms on each. kombu's SQLAlchemy
transport asks for messages once a second. The number of requests includes those of connecting. The processor time of a
server is all that it uses, its housekeeping and other programs' requests included; that of a worker includes its pool.

The consumers of a fleet take one message at a time and run ten in a process. They are idle, or all but one are busy,
which means that each holds a message until the end. In both cases the messages whose delay is measured are sent one at
a time, and the processor time of a message is what the server needs beyond that of the idle fleet. In a burst, as many
messages as consumers are sent at once. A backlog is consumed with a prefetch count of 64. Processor time is counted in
ticks of 10 ms, so 0 ms for a message means that there was less to count."""


@dataclass(frozen=True)
class Run:
    """A run: its date, size (`quick`, `default` or `full`), number of rounds, and the versions of the software.

    A run may have some of the measures only.
    """

    day: date
    size: str
    rounds: int
    versions: Mapping[str, str]
    #: The names of the systems in the order of the columns, with their titles.
    systems: Mapping[str, str]
    #: The systems that were left out, with the reason.
    absent: Mapping[str, str]
    #: The titles of all measures by name, in the order of the report.
    titles: Mapping[str, str]


def page(run: Run, results: Results, existing: str = '') -> str:
    """Return the report as reStructuredText. It keeps the sections of `existing`, a report, that this run lacks."""
    kept = dict(_SECTION.findall(existing))
    parts = [EXPLAINED, simple_table([['Column', 'System'], *([name, title] for name, title in TITLES.items())])]
    for measure, title in run.titles.items():
        rows = results.of(measure)
        if text := section(run, results, measure, rows) if rows else kept.get(title, '').strip():
            parts.append(f'{title}\n{"-" * len(title)}\n\n{text}')
    if _PLOT in existing or any(not row.point for row in results.values):
        parts.append(image(_PLOT, _BARS))
    return '\n\n'.join(parts)


def section(run: Run, results: Results, measure: str, rows: Mapping[Row, Mapping[str, Sequence[float]]]) -> str:
    """Return the date and the table of one measure, and what was not measured."""
    here = [name for name in run.systems if any(values.get(name) for values in rows.values())]
    taken = max((len(found) for values in rows.values() for found in values.values()), default=0)
    parts = [measured(replace(run, rounds=taken or run.rounds)), *([table_of(rows, here)] if here else [])]
    without = [
        *(f'{name}: {reason}' for name, reason in run.absent.items()),
        *(f'{name}: {reason}' for (of, name), reason in results.missing.items() if of == measure),
    ]
    if without:
        parts.append(f'Not measured: {"; ".join(without)}.')
    if any(row.point for row in rows):
        parts.append(image(f'{measure}.svg', f'{run.titles[measure]}: each figure as a line'))
    return '\n\n'.join(parts)


def summary(run: Run, results: Results, folder: str) -> str:
    """Return the text for a README: the headlines in one table, and the plot in `folder`."""
    rows = {row: values for row, values in results.values.items() if row.headline and any(values.values())}
    named = {replace(row, label=f'{run.titles[row.measure]}: {row.label}'): values for row, values in rows.items()}
    return '\n\n'.join([measured(run), table_of(named, list(run.systems)), image(f'{folder}/{_PLOT}', _BARS)])


def image(path: str, alt: str) -> str:
    """Return the directive that shows a plot."""
    return f'.. image:: {path}\n   :alt: {alt}'


def measured(run: Run) -> str:
    """Return a sentence with the date and the versions."""
    return (
        f'Measured on {run.day.isoformat()}, size *{run.size}*, {count(run.rounds, "round")}, with '
        + ', '.join(f'{name} {version}' for name, version in run.versions.items())
        + '.'
    )


def inserted(existing: str, report: str) -> str:
    """Return a page with the report inserted between its two marker lines, or appended if it has none."""
    block = f'{_BEGIN}\n\n{report}\n\n{_END}'
    before, begin, rest = existing.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if begin and end:
        return before + block + after
    title = '=================\nCosts and figures\n=================\n'
    return f'{existing.rstrip() or title}\n\n{block}\n'.replace('\n\n\n', '\n\n')


def write(run: Run, results: Results, folder: Path) -> list[Path]:
    """Write page and plots into a folder and return their paths.

    Of an existing page only the benchmark's part changes, and of that only the sections that this run measured.

    If a README beside the folder has the marker lines, the headlines are written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / _PAGE
    existing = text.read_text('utf-8') if text.exists() else ''
    report = existing.partition(_BEGIN)[2].partition(_END)[0]
    text.write_text(inserted(existing, page(run, results, report)), 'utf-8')
    written = [text]
    systems = list(run.systems)
    bars = {row: values for row, values in results.values.items() if not row.point}
    if bars:
        written.append(folder / _PLOT)
        headlines = {row: values for row, values in bars.items() if row.headline}
        written[-1].write_text(plot(headlines or bars, systems, run.titles), 'utf-8')
    for measure in dict.fromkeys(row.measure for row in results.values if row.point):
        written.append(folder / f'{measure}.svg')
        written[-1].write_text(lines(results.of(measure), systems), 'utf-8')
    readme = folder.parent / 'README.rst'
    if not readme.exists() or _BEGIN not in readme.read_text('utf-8'):
        return written
    readme.write_text(inserted(readme.read_text('utf-8'), summary(run, results, folder.name)), 'utf-8')
    return [*written, readme]
