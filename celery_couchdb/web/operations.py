"""Actions that go on in the background: every page shows how far they are, and Activity how they ended.

An action has a thread of its own, which writes as the user who began it. It ends with the process of the page: what it
has not done by then is as it was, and Activity has what was recorded when it began.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable

from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.log import get_logger

from ..resources.change import Change
from ..resources.columns import Tone

logger = get_logger(__name__)

#: For how long pages show that an action has ended, in seconds.
_SHOWN_SECONDS = 60.0


class Operation:
    """One action under way."""

    def __init__(self, user: str, title: str, change: Change, recorded: Callable[[str], str]) -> None:
        """`title` says in words what is done, and `recorded` stores how it ended and returns what to say of that."""
        self.id, self.user, self.title, self.change = secrets.token_hex(8), user, title, change
        #: The error that ended it.
        self.error: CouchDBError | None = None
        #: What came of it, in one sentence, and the monotonic time of its end; '' while it is under way.
        self.outcome, self.ended_at = '', 0.0
        self.tone: Tone = ''
        self._recorded, self._ended = recorded, threading.Event()

    def start(self) -> None:
        """Begin, in a thread."""
        threading.Thread(target=self._run, name='celery-couchdb-operation', daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait for the end, at most so long, and return whether it has ended."""
        return self._ended.wait(seconds)

    @property
    def is_under_way(self) -> bool:
        """Whether it goes on."""
        return not self._ended.is_set()

    def _run(self) -> None:
        texts = list[str]()
        tone: Tone = 'bad'
        try:
            for _ in self.change.run():
                pass
            texts, tone = self.change.summary, self._tone()
        except CouchDBError as exc:
            self.error = exc
            texts = [*([self.change.outcome] if self.change.seen else []), str(exc)]
        except Exception as exc:
            logger.exception('an action of the page has failed')
            texts = [self.change.outcome, f'then it failed: {exc!r}']
        text = '; '.join(texts).rstrip('.')
        try:
            self.outcome = self._recorded(f'{text[:1].upper()}{text[1:]}.')
        finally:
            self.tone, self.ended_at = tone, time.monotonic()
            self._ended.set()

    def _tone(self) -> Tone:
        change = self.change
        is_odd = change.is_stopped or change.warning or not change.done.total()
        return 'bad' if change.refusals else 'warning' if is_odd else 'good'


class Operations:
    """The actions of a page that are under way, or ended a moment ago, whoever began them. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._known = threading.Lock(), list[Operation]()

    def begin(self, operation: Operation) -> None:
        """Start an action, and show it until a moment after its end."""
        with self._lock:
            self._known.append(operation)
        operation.start()

    def forget(self, operation: Operation) -> None:
        """Show an action no more: its user was told how it ended."""
        with self._lock:
            self._known.remove(operation)

    def shown(self) -> list[Operation]:
        """Return the actions that pages show, the first first."""
        with self._lock:
            last = time.monotonic() - _SHOWN_SECONDS
            self._known = [one for one in self._known if one.is_under_way or one.ended_at > last]
            return [*self._known]

    def stop(self, name: str) -> str:
        """Let the action with this id end after what it does just now; return its title, or '' if it has ended."""
        found = next((one for one in self.shown() if one.id == name and one.is_under_way), None)
        if found is None:
            return ''
        found.change.stop()
        return found.title
