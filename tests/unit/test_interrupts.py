"""Interruption of the demo (`examples.demo.interrupts`)."""

from __future__ import annotations

from tests.support import run_python

LOST = """
import signal
from examples.demo.interrupts import Interrupts, Stopped

class Resource:
    def __del__(self):
        {act}

interrupts = Interrupts()
resource = Resource()
del resource
try:
    interrupts.check()
except Stopped:
    print('stopped')
"""


def test_signal_whose_exception_is_lost_in_a_destructor() -> None:
    done = run_python(LOST.format(act='signal.raise_signal(signal.SIGTERM)'))
    assert (done.stdout, done.stderr) == ('stopped\n', '')


def test_other_errors_in_destructors_are_printed() -> None:
    done = run_python(LOST.format(act='1 / 0'))
    assert done.stdout == ''
    assert 'ZeroDivisionError' in done.stderr
