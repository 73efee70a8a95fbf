"""Tables of verdicts in reStructuredText."""

from __future__ import annotations

from collections.abc import Mapping

from tests.benchmarks.table import simple_table

from .verdict import Verdict

__all__ = ['faults_table', 'verdicts_table']


def verdicts_table(verdicts: Mapping[str, Verdict]) -> str:
    """Return a table with a column for each run."""
    figures: dict[str, list[int] | list[str]] = {
        'Tasks accepted': [verdict.tasks for verdict in verdicts.values()],
        'Chords among them': [verdict.chords for verdict in verdicts.values()],
        'Faults survived': [verdict.faults.total() for verdict in verdicts.values()],
        'Lost': [len(verdict.lost) for verdict in verdicts.values()],
        'Results lost': [len(verdict.results_lost) for verdict in verdicts.values()],
        'Twice, without a fault': [len(verdict.twice) for verdict in verdicts.values()],
        'Twice, because of a fault': [len(verdict.explained) for verdict in verdicts.values()],
        'Sent twice': [len(verdict.sent_twice) for verdict in verdicts.values()],
        'Before their time': [len(verdict.too_early) for verdict in verdicts.values()],
        'Listeners that miss the last event': [int(verdict.deaf) for verdict in verdicts.values()],
        'Left in the databases': [len(verdict.remains) for verdict in verdicts.values()],
        'Acknowledged early, lost with a killed process': [len(verdict.at_most_once) for verdict in verdicts.values()],
        'Results of such, lost with a killed process': [
            len(verdict.results_at_most_once) for verdict in verdicts.values()
        ],
        'Pauses by the machine itself': [verdict.pauses for verdict in verdicts.values()],
        'Longest standstill': [f'{verdict.standstill:.1f} s' for verdict in verdicts.values()],
    }
    return simple_table(
        [
            ['', *verdicts],
            *(
                [name, *(f'{value:,}' if isinstance(value, int) else value for value in values)]
                for name, values in figures.items()
            ),
        ]
    )


def faults_table(verdicts: Mapping[str, Verdict]) -> str:
    """Return a table of how often each kind of fault happened, with a column for each run."""
    names = sorted({name for verdict in verdicts.values() for name in verdict.faults})
    return simple_table(
        [
            ['Fault', *verdicts],
            *([name, *(str(verdict.faults[name]) for verdict in verdicts.values())] for name in names),
        ]
    )


def complaints(verdict: Verdict) -> str:
    """Return one line for each broken promise."""
    found = {
        'lost': verdict.lost,
        'result lost': verdict.results_lost,
        'twice': verdict.twice,
        'sent twice': verdict.sent_twice,
        'too early': verdict.too_early,
        'missed the last event': ['the listener'] * verdict.deaf,
        'remains': verdict.remains,
    }
    return '\n'.join(f'{what}: {which}' for what, all_ in found.items() for which in all_)
