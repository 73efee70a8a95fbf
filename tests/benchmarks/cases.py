"""Cases, their figures, and the results of all rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .systems.base import System

__all__ = ['Case', 'Figure', 'NotMeasured', 'Results', 'Row']


class NotMeasured(Exception):
    """The case does not apply to this system; the text says why."""


@dataclass(frozen=True)
class Figure:
    """One number that a case measures. `name` is empty if the case has only one figure."""

    unit: str
    more_is_better: bool = True
    name: str = ''


@dataclass(frozen=True)
class Case:
    """One measurement. `run(system)` returns a value for each figure, or None if the figure cannot be measured there.

    `run` *raises* `NotMeasured` if the case does not apply to the system. `rounds` limits the number of rounds.
    `headline` cases are shown in the plot, and in a README that has the marker lines of the report.
    Cases that differ in one number only, which is `at`, are points of lines: each figure is a line.
    """

    measure: str
    label: str
    figures: tuple[Figure, ...]
    run: Callable[[System], Sequence[float | None]]
    rounds: int | None = None
    headline: bool = False
    at: int | None = None


@dataclass(frozen=True)
class Row:
    """One row of the table: a figure of a case."""

    measure: str
    label: str
    unit: str
    more_is_better: bool
    headline: bool = False
    #: The name of the figure and the number of the case, if it is a point of a line.
    point: tuple[str, int] | None = None

    @classmethod
    def of(cls, case: Case, figure: Figure) -> Row:
        """Return the row for a figure of a case."""
        label = ', '.join(part for part in (case.label, figure.name) if part)
        point = None if case.at is None else (figure.name, case.at)
        return cls(case.measure, label, figure.unit, figure.more_is_better, case.headline, point)


@dataclass
class Results:
    """The values of all rounds by row and system name, and the reasons why something was not measured."""

    values: dict[Row, dict[str, list[float]]] = field(default_factory=dict)
    #: One reason for each measure and system.
    missing: dict[tuple[str, str], str] = field(default_factory=dict)

    def of(self, measure: str) -> dict[Row, dict[str, list[float]]]:
        """Return the rows of a measure in the order of their cases, but the points of a line together."""
        rows = [row for row in self.values if row.measure == measure]
        lines = list(dict.fromkeys(row.point[0] for row in rows if row.point))
        rows.sort(key=lambda row: lines.index(row.point[0]) if row.point else -1)
        return {row: self.values[row] for row in rows}

    def add(self, case: Case, system: str, values: Sequence[float | None]) -> None:
        """Add the values of a case on a system."""
        for figure, value in zip(case.figures, values, strict=True):
            found = self.values.setdefault(Row.of(case, figure), {}).setdefault(system, [])
            if value is not None:
                found.append(value)

    def miss(self, case: Case, system: str, reason: str) -> None:
        """Record that a case was not measured on a system."""
        for figure in case.figures:
            self.values.setdefault(Row.of(case, figure), {}).setdefault(system, [])
        self.missing.setdefault((case.measure, system), reason)
