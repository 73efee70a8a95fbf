"""What is measured: cases, their figures, and the results of all rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .systems.base import System

__all__ = ['Case', 'Figure', 'NotMeasured', 'Results', 'Row']


class NotMeasured(Exception):
    """This system has no such thing; the text says why."""


@dataclass(frozen=True)
class Figure:
    """One number that a case gives. `name` is empty if the case has only one."""

    unit: str
    more_is_better: bool = True
    name: str = ''


@dataclass(frozen=True)
class Case:
    """One measurement. `run(system)` returns a value for each figure, None for one that cannot be had there.

    *Raises* `NotMeasured` where the system has no such thing. `rounds` limits how often it is repeated. A `headline` stands in
    the README and in the plot, too.
    """

    measure: str
    label: str
    figures: tuple[Figure, ...]
    run: Callable[[System], Sequence[float | None]]
    rounds: int | None = None
    headline: bool = False


@dataclass(frozen=True)
class Row:
    """One line of the table: a figure of a case."""

    measure: str
    label: str
    unit: str
    more_is_better: bool
    headline: bool = False

    @classmethod
    def of(cls, case: Case, figure: Figure) -> Row:
        """Return the row of a case's figure."""
        label = ', '.join(part for part in (case.label, figure.name) if part)
        return cls(case.measure, label, figure.unit, figure.more_is_better, case.headline)


@dataclass
class Results:
    """The values of all rounds, by row and by the system's name; and what was not measured, with the reason."""

    values: dict[Row, dict[str, list[float]]] = field(default_factory=dict)
    #: The reasons by measure and system, each once.
    missing: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, case: Case, system: str, values: Sequence[float | None]) -> None:
        """Add what a case gave on a system."""
        for figure, value in zip(case.figures, values, strict=True):
            found = self.values.setdefault(Row.of(case, figure), {}).setdefault(system, [])
            if value is not None:
                found.append(value)

    def miss(self, case: Case, system: str, reason: str) -> None:
        """Note that a case gave nothing on a system."""
        for figure in case.figures:
            self.values.setdefault(Row.of(case, figure), {}).setdefault(system, [])
        self.missing.setdefault((case.measure, system), reason)
