"""A change of many things, which is done part by part, can be followed and stopped, and says what came of it.

The command and the page do the same changes: the command shows a bar and ends with Ctrl-C, the page does them in the
background and has a button to stop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple, TypeVar

from kombu_couchdb.couchdb.bulk import BATCH_DOCS
from kombu_couchdb.errors import CouchDBError

from .resource import counted

T = TypeVar('T')

#: The maximum number of reasons why items were not changed that are kept.
_MAX_REASONS = 5


class Part(NamedTuple):
    """What came of a part of a change."""

    #: How many items it had.
    size: int
    #: How many were changed, by what was done to them: `retried`; or by two phrases: `is due now|are due now`.
    done: Mapping[str, int]
    #: Why others were not, by id.
    refused: Mapping[str, str]
    #: The queues in which messages wait now.
    queues: Collection[str] = ()


class Change:
    """A change of many things. `Change` itself does nothing: `run` is iterated, from whichever thread."""

    def __init__(
        self, noun: str, total: int | None, parts: Iterable[Part], consumed: Callable[[], Collection[str]] = tuple
    ) -> None:
        """`parts` does the change; `total` is the number of things called `noun`, None if it is unknown.

        `consumed` returns the queues that workers consume.
        """
        self.noun, self.total, self._parts, self._consumed = noun, total, iter(parts), consumed
        self._queues, self.warning = set[str](), ''
        self.seen, self.refusals, self.lost = 0, 0, 0
        self.done, self.refused = Counter[str](), dict[str, str]()
        self.is_stopped = False

    @classmethod
    def of(
        cls,
        noun: str,
        total: int | None,
        items: Iterable[T],
        act: Callable[[Sequence[T]], Iterable[Part]],
        consumed: Callable[[], Collection[str]] = tuple,
    ) -> Change:
        """Return the change of items by `act`, a batch after the other. They may be read while others are changed."""
        found = iter(items)
        batches = iter(lambda: list(islice(found, BATCH_DOCS)), [])
        return cls(noun, total, (part for batch in batches for part in act(batch)), consumed)

    def run(self) -> Iterator[Part]:
        """Do the change, and yield each part that is done. Who stops iterating leaves the rest as it is."""
        while not self.is_stopped and (part := next(self._parts, None)) is not None:
            count = sum(part.done.values())
            self.seen += part.size
            self.refusals += len(part.refused)
            self.lost += max(0, part.size - count - len(part.refused))
            self.done.update(part.done)
            self._queues |= {*part.queues}
            self.refused |= islice(part.refused.items(), max(0, _MAX_REASONS - len(self.refused)))
            yield part
        with suppress(CouchDBError):  # all is done, and this is only a hint
            if self._queues and (names := sorted(self._queues.difference(self._consumed()))):
                self.warning = f'no worker consumes {", ".join(names)}'

    def stop(self) -> None:
        """Let `run` end after the part that it does just now; from any thread."""
        self.is_stopped = True

    @property
    def progress(self) -> str:
        """How far it is: `4,000 of 20,000 failures`."""
        return f'{self.seen:,} of {counted(self.total, self.noun)}' if self.total else counted(self.seen, self.noun)

    @property
    def outcome(self) -> str:
        """What was done so far: `3 failures retried; 2 jobs are due now`."""
        shown = {words: count for words, count in self.done.items() if count} or dict([*self.done.items()][:1])
        texts = [f'{_number(count, self.noun)} {_phrase(words, count)}' for words, count in shown.items()]
        return '; '.join(texts or [f'no {self.noun} was changed'])

    @property
    def summary(self) -> list[str]:
        """What was done so far and what was not, in sentences without a full stop."""
        texts = [*([self.outcome] if self.done.total() or not self.refusals else []), *self.problems]
        texts += [self.warning] if self.warning else []
        return [*texts, 'it was stopped, and the rest is as it was'] if self.is_stopped else texts

    @property
    def problems(self) -> list[str]:
        """Why some were not changed, in sentences without a full stop."""
        texts = [reason if name in reason else f'{name}: {reason}' for name, reason in self.refused.items()]
        if (more := self.refusals - len(self.refused)) > 0:
            texts.append(f'and {more:,} more were refused')
        if self.lost:
            texts.append(f'{self.lost:,} were changed by somebody else just now')
        return texts


def _number(count: int, noun: str) -> str:
    return counted(count, noun) if noun else f'{count:,}'


def _phrase(words: str, count: int) -> str:
    one, _, many = words.partition('|')
    return one if count == 1 else many or one
