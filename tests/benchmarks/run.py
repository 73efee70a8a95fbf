"""The rounds: systems take turns on each case (A B C, A B C), so that noise affects all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .cases import Case, NotMeasured, Results
from .figures import number
from .systems import System
from .text import in_one_line

__all__ = ['run']


def run(
    cases: Sequence[Case], systems: Iterable[System], rounds: int, results: Results, tell: Callable[[str], None]
) -> None:
    """Run all cases and add their values to `results`; call `tell(text)` with the outcome of each."""
    systems = list(systems)
    steps = [
        (nth, case, system)
        for nth in range(1, rounds + 1)
        for case in cases
        for system in systems
        if case.rounds is None or nth <= case.rounds
    ]
    for done, (nth, case, system) in enumerate(steps, 1):
        head = f'{done}/{len(steps)} round {nth}, {case.measure}: {case.label}, {system.name}: '
        try:
            values = case.run(system)
        except NotMeasured as exc:
            results.miss(case, system.name, str(exc))
            continue
        except Exception as exc:  # the failure of one system must not cost the figures of the others: the report has it
            results.miss(case, system.name, f'failed ({in_one_line(exc)})')
            tell(f'{head}failed ({in_one_line(exc)})')
            continue
        results.add(case, system.name, values)
        tell(
            head
            + ', '.join(f'{number(value)} {figure.unit}' for figure, value in zip(case.figures, values, strict=True))
        )
