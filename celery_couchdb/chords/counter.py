"""Chords that count themselves: one small document for each part, and one that decides who dispatches the body.

::

    chord-unlock-<group id>                            {type: "Chord", size, added, body, nested, claimed, sent, …}
    chord-unlock-<group id>:part:<index>:<task id>     {type: "Part", task_id, index, state, …[, value]}

The id of a part is fixed: a part that is delivered twice counts once. Whoever writes a part counts them, and who finds
the last one there claims the `Chord` by its revision. Only who has the claim dispatches the body and notes that it was
`sent`; then all is deleted. If its worker is killed in between, `unfinished` finds the chord for whoever sweeps next.
A chord expires, with its parts, when no part has come for the lifetime of results.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator

from kombu_couchdb.couchdb.shapes import anything, items, maybe, members, number, text
from kombu_couchdb.documents.idempotency import is_repeated
from kombu_couchdb.errors import Conflict

from ..results.documents import Document, Packed, stamp
from ..results.store import Recent, Store

__all__ = ['LAG', 'Chords', 'size_of']

#: Chords whose documents this process remembers, and the longest body, in characters as encoded, of such a one.
_REMEMBERED, _LONGEST = 1000, 10_000

#: Parts that are counted each time. Counting costs the server 12 µs a row (measured); for more parts than this it is
#: first asked, for 1 ms, whether enough has been written at all since they were last counted.
_FEW = 100

#: How long, in seconds, what was written just now may not be seen yet: in a cluster, or in another shard.
LAG = 0.1

#: In a cluster, if no more parts than so many are missing they are counted once more: else it might be that nobody has seen the
#: last.
_LAST = 3

#: Where a part goes that has no place in the header: to the end.
_UNORDERED = 99_999_999

#: What a chord's document has from the start.
_NEW: Document = {
    'type': 'Chord',
    'size': None,
    'added': [],
    'body': None,
    'nested': False,
    'claimed': None,
    'sent': False,
}

#: How often a chord's document is tried to be changed while others change it.
_ATTEMPTS = 100


class Chords:
    """The chords of one result database. Durations are seconds.

    `lifetime` is how long their documents are kept without a change; a chord that has not changed for `patience` may be
    taken for unfinished business, for it was left by a worker that is gone.
    """

    def __init__(self, store: Store, prefix: str, lifetime: float | None, patience: float) -> None:
        self._store, self._prefix, self._lifetime, self._patience = store, prefix, lifetime, patience
        self._known: Recent[Document] = Recent(_REMEMBERED)
        #: By group id, how many parts there were, and at which point in the database's history that was true.
        self._counted: Recent[tuple[int, int]] = Recent(_REMEMBERED)

    # -- how many parts are to come

    def prepare(self, group_id: str, body: Packed | None, *, nested: bool) -> None:
        """Store a chord before its header is sent. What an earlier run left is deleted.

        `body` is its encoded callback; `nested` says that there are groups in the header.
        """
        doc: Document = {
            '_id': self._prefix + group_id,
            **_NEW,
            'body': body,
            'nested': nested,
            'run': uuid.uuid4().hex,
        }
        if is_repeated() and self._store.known([doc['_id']]):
            return  # who sent this before was killed, after he had come to this point
        for _ in range(_ATTEMPTS):
            if rev := self._put(doc):
                self._remember(group_id, {**stamp(doc, self._now(), self._lifetime), '_rev': rev})
                return
            found = self._store.current(doc['_id']) or {}
            if found.get('run') == doc['run']:
                return  # it was stored, and only the answer was lost
            # The same frozen chord is sent again: its parts have the ids of those that came before.
            self._store.delete_all(list(self._parts(group_id)))
            doc.pop('_rev', None)
            doc.update({'_rev': found['_rev']} if found else {})
        raise self._beaten(group_id)

    def begin(self, group_id: str, size: int) -> None:
        """Store how many parts a chord has; the last of them is about to be sent."""
        self._change(group_id, lambda doc: {**doc, 'size': size})

    def add(self, group_id: str, task_id: str) -> None:
        """Let a chord wait for one part more, that of a task."""
        self._change(
            group_id, lambda doc: {**doc, 'added': [*(added for added in doc['added'] if added != task_id), task_id]}
        )

    def _change(self, group_id: str, change: Callable[[Document], Document]) -> None:
        doc_id = self._prefix + group_id
        for _ in range(_ATTEMPTS):
            doc = self._known.pop(group_id, None) or self._store.current(doc_id)
            if doc is None and is_repeated() and self._store.known([doc_id]):
                return  # it is done
            if self._put(change(doc or {'_id': doc_id, **_NEW})):
                return
        raise self._beaten(group_id)

    # -- parts

    def part(self, group_id: str, index: int | None, task_id: str, state: str, value: Packed | None) -> Document:
        """Return the document of a part. `value` is its encoded result; None: it is to be found under the task's id."""
        place = f'{_UNORDERED if index is None else index:08d}'
        doc: Document = {
            '_id': f'{self._prefix}{group_id}:part:{place}:{task_id}',
            'type': 'Part',
            'task_id': task_id,
            'index': index,
            'state': state,
            **({'value': value} if value else {}),
        }
        return stamp(doc, self._now(), self._lifetime)

    def store_part(self, part: Document) -> None:
        """Store a part, unless it is there already."""
        self._store.put(part)

    def parts(self, group_id: str, *, ordered: bool) -> list[Document]:
        """Return the parts of a chord in the order of its header, or else in the order of their arrival."""
        rows = self._store.id_range(f'{self._prefix}{group_id}:part:', docs=True)
        docs = [row['doc'] for row in rows if row.get('doc')]
        return docs if ordered else sorted(docs, key=lambda doc: doc['date'] if number(doc.get('date')) else 0.0)

    # -- the end

    def claim(self, group_id: str, part: str) -> Document | None:
        """Return the chord's document if its last part is there and its end is now this caller's alone to bring about.

        `part` is the id of the part that has just been stored.
        """
        for _ in range(_ATTEMPTS):
            chord = self._known.get(group_id) or self._store.current(self._prefix + group_id)
            if chord is None and self._store.known([self._prefix + group_id]):
                self._store.delete(part)  # the chord is done: this is a late duplicate
            if chord is None or not _is_sound(chord) or chord.get('claimed'):
                return None  # or its header is still being sent
            self._remember(group_id, chord)
            complete = self._complete(group_id, size_of(chord))
            if complete is False:
                return None
            if complete and (claimed := self._claim(chord)):
                return claimed
            self._forget(group_id)  # it is over, somebody else has it, or a part was added
        return None

    def holds(self, chord: Document) -> bool:
        """Tell whether the end of a chord that was claimed is still this caller's to bring about."""
        found = self._store.current(chord['_id'])
        return found is not None and bool(found['_rev'] == chord['_rev'])

    def done(self, group_id: str, chord: Document) -> bool:
        """Note that a chord has ended, and delete what was stored of it, itself at the very last; False: somebody else has it."""
        self._forget(group_id)
        if not chord.get('sent'):
            rev = self._put({**chord, 'sent': True})
            if rev is None:
                return False
            chord = {**chord, '_rev': rev}
        self._store.delete_all([*self._parts(group_id), chord])
        return True

    # -- for sweepers

    def unfinished(self, ids: Iterable[str]) -> Iterator[tuple[str, Document, bool]]:
        """Claim those of the chords with these document ids that are complete, and yield group id and document of each.

        The third is whether somebody who is gone had begun to end it. What changed or was claimed just now is left alone.
        """
        before = self._now() - self._patience
        for chord in self._store.read_many(doc_id for doc_id in ids if doc_id.startswith(self._prefix)):
            if chord is None or not _is_sound(chord) or chord['date'] > before:
                continue
            group_id = chord['_id'].removeprefix(self._prefix)
            if chord.get('sent'):
                self.done(group_id, chord)
            elif (
                chord.get('body')
                and (chord.get('claimed') or self._complete(group_id, size_of(chord)))
                and (claimed := self._claim(chord))
            ):
                yield group_id, claimed, bool(chord.get('claimed'))

    def expire(self, ids: Iterable[str], parts: Iterable[Document]) -> int:
        """Delete chords and parts whose time is over, if none of their chord has come since; return how many are gone."""
        count = 0
        for chord in self._store.client.fetch([doc_id for doc_id in ids if doc_id.startswith(self._prefix)]):
            if chord is None:
                continue
            docs = self.parts(chord['_id'].removeprefix(self._prefix), ordered=True)
            newest = max(
                (doc['expires'] for doc in [*docs, chord] if isinstance(doc.get('expires'), (int, float))), default=0
            )
            if newest > self._now():
                self._store.client.bulk(
                    [{**chord, 'expires': newest}]
                )  # one that cannot be written back stays as it is
            else:
                count += self._store.delete_all([*docs, chord])
        of = {part['_id']: part['_id'].rpartition(':part:')[0] for part in parts}
        alive = {doc['_id'] for doc in self._store.client.fetch(sorted(set(of.values()))) if doc}
        return count + self._store.delete_all([part for part in parts if of[part['_id']] not in alive])

    # -- requests

    def _now(self) -> float:
        return self._store.client.clock.now()

    def _remember(self, group_id: str, chord: Document) -> None:
        if len(str(chord.get('body'))) <= _LONGEST:
            self._known[group_id] = chord

    def _forget(self, group_id: str) -> None:
        self._known.pop(group_id, None)
        self._counted.pop(group_id, None)

    def _beaten(self, group_id: str) -> Conflict:
        return Conflict(f'{self._store.client.address.url}: others kept changing {self._prefix}{group_id}')

    def _put(self, doc: Document) -> str | None:
        return self._store.put(stamp(doc, self._now(), self._lifetime))

    def _claim(self, chord: Document) -> Document | None:
        claimed = stamp({**chord, 'claimed': uuid.uuid4().hex}, self._now(), self._lifetime)
        rev = self._store.claim(claimed)
        return {**claimed, '_rev': rev} if rev else None

    def _parts(self, group_id: str) -> Iterator[Document]:
        for row in self._store.id_range(f'{self._prefix}{group_id}:part:'):
            yield {'_id': row['id'], '_rev': row['value']['rev']}

    def _count(self, group_id: str) -> int | None:
        """Return how many parts are there; None if the chord itself is not."""
        chord = self._prefix + group_id
        ids = [row['id'] for row in self._store.id_range(chord)]  # its own sorts just before those of its parts
        return sum(1 for doc_id in ids if doc_id.startswith(f'{chord}:part:')) if chord in ids else None

    def _complete(self, group_id: str, size: int) -> bool | None:
        """Tell whether all parts are there; None if the chord is not, for it was brought to its end.

        Each part is one write, and CouchDB numbers its writes: as long as that number has grown by less than there were
        parts to come, they cannot all have come. In a cluster each copy has numbers of its own.
        """
        if self._store.client.is_cluster():
            count = self._count(group_id)
            if count is not None and 0 < size - count <= _LAST:
                time.sleep(LAG)  # not for an event: the copy that was read does not say that it lags behind
                count = self._count(group_id)
            return None if count is None else count >= size
        if size <= _FEW:
            count = self._count(group_id)
            return None if count is None else count >= size
        written = self._store.writes()
        known, then = self._counted.get(group_id, (0, written - size))
        if written - then < size - known:
            return False
        count = self._count(group_id)
        if count is None:
            return None
        self._counted[group_id] = (count, written)
        return count >= size


def size_of(chord: Document) -> int:
    """Return how many parts a chord has."""
    return int(chord['size']) + len(chord['added'])


#: Tells whether nobody has spoilt a chord's document, and its size is known.
_is_sound = members(
    size=lambda size: isinstance(size, int) and size > 0,
    added=items(anything),
    date=number,
    body=maybe(members()),
    claimed=maybe(text),
)
