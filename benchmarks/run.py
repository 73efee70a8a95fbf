"""Run the cases in rounds, interleaved between the systems: A B C, A B C, so that noise hits all alike."""

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
    """Add to the results, step by step; `tell(text)` is called after each with what came of it."""
    systems = list(systems)
    steps = [
        (turn, case, system)
        for turn in range(1, rounds + 1)
        for case in cases
        for system in systems
        if case.rounds is None or turn <= case.rounds
    ]
    for done, (turn, case, system) in enumerate(steps, 1):
        head = f'{done}/{len(steps)} round {turn}, {case.measure}: {case.label}, {system.name}: '
        try:
            values = case.run(system)
        except NotMeasured as exc:
            results.miss(case, system.name, str(exc))
            continue
        except (
            Exception
        ) as exc:  # one system's failure must not cost the figures of all the others: it is told and noted
            results.miss(case, system.name, f'failed ({in_one_line(exc)})')
            tell(f'{head}failed ({in_one_line(exc)})')
            continue
        results.add(case, system.name, values)
        tell(
            head
            + ', '.join(f'{number(value)} {figure.unit}' for figure, value in zip(case.figures, values, strict=True))
        )
