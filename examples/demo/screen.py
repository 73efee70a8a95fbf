"""The output of the demo: its progress, then the table."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence

from .journal import Journal
from .scenes import Scene

_ROW = '{:<23} {:>4} {:>4} {:>10} {:>8}  {:<7}  {:<11} {}'
#: Seconds between updates of the line, and between lines where none can be updated.
_UPDATE_EVERY, _PLAIN_EVERY = 0.1, 5.0


class Screen:
    """Standard output: a terminal, where one line is updated, or a file, where a line is added every 5 s."""

    def __init__(self) -> None:
        #: When the demo began, seconds since the epoch.
        self.began = time.time()
        self._terminal = sys.stdout.isatty() and os.environ.get('TERM') != 'dumb'
        self._color = self._terminal and not os.environ.get('NO_COLOR')
        self._shown_at = 0.0

    def restart(self) -> None:
        """Start to count the seconds now."""
        self.began = time.time()

    def now(self) -> float:
        """Return the seconds since the start of the demo."""
        return time.time() - self.began

    def say(self, text: str) -> None:
        """Print a line that stays."""
        print(f'{self._erased()}{text}', flush=True)
        self._shown_at = time.time() if not self._terminal else 0.0

    def report(self, text: str) -> None:
        """Print a line that stays, with the time in seconds."""
        self.say(f'{self.now():5.1f} s  {text}')

    def show(self, text: str) -> None:
        """Show the progress."""
        since = time.time() - self._shown_at
        if self._terminal and since > _UPDATE_EVERY:
            line = f'{self.now():5.1f} s  {text}'
            width = shutil.get_terminal_size().columns - 1
            print(f'{self._erased()}{line[:width]}', end='', flush=True)
            self._shown_at = time.time()
        elif not self._terminal and since > _PLAIN_EVERY:
            self.report(text)

    def table(self, scenes: Sequence[Scene], journal: Journal) -> None:
        """Print the table of all scenes."""
        self.say('')
        self.say(
            _ROW.format('seconds since the start', 'sent', 'due', 'started', 'finished', 'where', 'result', '').rstrip()
        )
        self.say('-' * 78)
        for scene in scenes:
            self.say(self._row(scene, journal))
        self.say('')

    def _row(self, scene: Scene, journal: Journal) -> str:
        runs = sorted(scene.runs(journal), key=lambda run: run.started)
        starts = sorted({self._since(run.started) for run in runs}, key=float)
        ends = [run.finished for run in runs if run.finished is not None and run.state == 'SUCCESS']
        workers = list(dict.fromkeys(run.worker for run in runs))
        where = ' > '.join(workers) if scene.starts > 1 else ', '.join(sorted(workers))
        return _ROW.format(
            scene.what,
            self._since(scene.sent),
            self._since(scene.due),
            '-'.join([*starts[:1], *starts[1:][-1:]]) or '-',
            self._since(max(ends, default=None)),
            where or '-',
            scene.outcome,
            self._mark(not scene.flaws),
        )

    def _since(self, when: float | None) -> str:
        return '-' if when is None else f'{when - self.began:.1f}'

    def _mark(self, good: bool) -> str:
        text, color = ('ok', 32) if good else ('NO', 31)
        return f'\033[{color}m{text}\033[0m' if self._color else text

    def _erased(self) -> str:
        return '\r\033[K' if self._terminal else ''
