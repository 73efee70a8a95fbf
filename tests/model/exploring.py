"""How far the models are explored, and the faults that are put into the product to see that they are found."""

from __future__ import annotations

import inspect
import os
import textwrap
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

#: `MODEL_EXAMPLES=20` explores twenty times as many examples, and different ones in each run.
MORE = int(os.environ.get('MODEL_EXAMPLES', '0'))

#: The mark of tests that put faults in.
finds_faults = pytest.mark.skipif(not MORE, reason='takes minutes: make model')


def explore(machine: type[RuleBasedStateMachine], examples: int, steps: int = 60, **more: Any) -> None:
    """Run a state machine with so many examples of so many steps, always the same ones unless there are `MORE`."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples * max(1, MORE),
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=not MORE,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
            **more,
        ),
    )


class Fault(NamedTuple):
    """A replacement of `good` by `bad` in the source of the method `function` of `owner`."""

    name: str
    machine: type[RuleBasedStateMachine]
    owner: Any
    function: str
    good: str
    bad: str


def put_in(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a fault into the product."""
    found = inspect.getattr_static(fault.owner, fault.function)
    function: Any = found.fget if isinstance(found, property) else getattr(found, '__func__', found)
    source = textwrap.dedent(inspect.getsource(function))
    assert fault.good in source, f'the source of {fault.function} has changed: update the fault {fault.name!r}'
    names: dict[str, Any] = {}
    exec(
        compile('from __future__ import annotations\n' + source.replace(fault.good, fault.bad), fault.name, 'exec'),
        function.__globals__,
        names,
    )
    monkeypatch.setattr(fault.owner, fault.function, names[fault.function])


def examples_until_found(machine: type[RuleBasedStateMachine], most: int = 1000, steps: int = 60) -> int | None:
    """Return how many examples were tried until one failed, or None if none did."""
    tried = 0

    class Counting(machine):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            nonlocal tried
            tried += 1
            super().__init__()

    with pytest.MonkeyPatch.context() as same:
        same.setattr(f'{__name__}.MORE', 0)
        try:
            explore(Counting, most, steps, phases=[Phase.generate], report_multiple_bugs=False)
        except (AssertionError, KeyError):
            return tried
    return None


def assert_found(fault: Fault, monkeypatch: pytest.MonkeyPatch, most: int = 1000, steps: int = 60) -> None:
    """Put a fault in, print how many examples were tried until one failed, and fail the test if none did."""
    put_in(fault, monkeypatch)
    tried = examples_until_found(fault.machine, most, steps)
    print(f'{fault.name}: {tried}')
    assert tried
