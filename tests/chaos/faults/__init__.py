"""All kinds of faults, by name."""

from __future__ import annotations

from collections.abc import Mapping

from .base import Fault
from .network import BlackHole, Broken, ClockSet, Cut, Failing, Narrow, Refused, Slow, TooMany, Unavailable
from .server import ServerKilled, ServerPaused, ServerStopped
from .workers import ChildKilled, ChildPaused, ClockAstray, ListenerPaused, WorkerKilled, WorkerPaused, WorkerStopped

__all__ = ['Fault', 'faults_of']

_ALWAYS: tuple[type[Fault], ...] = (
    WorkerKilled,
    WorkerPaused,
    WorkerStopped,
    ClockAstray,
    ListenerPaused,
    ChildKilled,
    ChildPaused,
    Cut,
    Refused,
    Slow,
    Narrow,
    BlackHole,
    Failing,
    Unavailable,
    TooMany,
    Broken,
    ClockSet,
)


def faults_of(*, stopping: bool, killing: bool, pausing: bool = False) -> Mapping[str, type[Fault]]:
    """Return the kinds of faults by name; faults of the server only if it may be stopped, killed or paused."""
    allowed: Mapping[type[Fault], bool] = {
        ServerStopped: stopping,
        ServerKilled: killing,
        ServerPaused: pausing,
    }
    return {kind.name: kind for kind in (*_ALWAYS, *(kind for kind, may in allowed.items() if may))}
