"""Counter of chords: one small document for each part, and one that decides which worker sends the body.

::

    chord-unlock-<group id>                            {type: "Chord", size, added, body, nested, claimed, sent, …}
    chord-unlock-<group id>:part:<index>:<task id>     {type: "Part", task_id, index, state, …[, value]}

The id of a part is fixed, so a part that is delivered twice counts once. A worker that stores a part counts the parts.
If all of them are stored, it claims the `Chord` by its revision. Only the worker that has the claim sends the body. It
then sets `sent` and deletes all documents of the chord. If this worker is killed before that, another worker finds the
chord in its next sweep, see `unfinished`. A chord expires with its parts if no part was stored during the
lifetime of results.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread
from typing import Any, NamedTuple, TypeGuard

from celery import states

from kombu_couchdb.couchdb.bulk import ATTEMPTS
from kombu_couchdb.couchdb.shapes import anything, items, maybe, members, number, text
from kombu_couchdb.documents.idempotency import is_repeated
from kombu_couchdb.errors import CouchDBError

from ..results.documents import Chord, ChordPart, Document, Packed, new_chord, stamp
from ..results.result_store import Recent, ResultStore, Shorter

#: The number of chords whose documents this process remembers, and the longest body of such a chord, in characters.
_REMEMBERED_CHORDS, _MAX_REMEMBERED_BODY = 1000, 10_000

#: Up to this size, the parts are counted each time: CouchDB needs 12 µs a row (measured). For larger chords, the number
#: of writes since the last count is read first, in 1 ms.
_MAX_SMALL_CHORD = 100

#: How long a write may be invisible to reads, in seconds: in another node of a cluster, or in another shard.
LAG_SECONDS = 0.1

#: In a cluster, if at most this number of parts is missing, the parts are counted again after `LAG_SECONDS`. Otherwise
#: the workers that store the last parts at the same time might each miss a part of another worker, and none would
#: complete the chord.
_MAX_LATE_PARTS = 3

#: The index in the id of a part without a position in the header: it sorts last.
_LAST_INDEX = 99_999_999


class Claimed(NamedTuple):
    """A chord that the caller completes, its parts, and whether another process has begun to complete it."""

    chord: Chord
    parts: list[Document]
    is_repeated: bool


class Chords:
    """The chords of one result database.

    `lifetime` is how long their documents are kept without a change, in seconds, or None. Another worker may complete a
    chord whose document has not changed for `takeover_after` seconds. *Every* method raises the errors of
    `kombu_couchdb.errors`.
    """

    def __init__(self, store: ResultStore, prefix: str, lifetime: float | None, takeover_after: float) -> None:
        self._store, self._prefix, self._lifetime, self._takeover_after = store, prefix, lifetime, takeover_after
        self._renewal = Lock()
        self._known: Recent[Chord] = Recent(_REMEMBERED_CHORDS)
        #: By group id: the number of parts, and the number of the database's last write, when they were counted.
        self._counted: Recent[tuple[int, int]] = Recent(_REMEMBERED_CHORDS)

    # -- the size of a chord

    def prepare(self, group_id: str, body: Packed | None, *, nested: bool) -> None:
        """Store a chord before its header is sent, and delete the parts of an earlier run.

        `body` is its encoded callback; `nested` says that there are groups in the header.
        """
        chord = new_chord(self._prefix + group_id)
        doc: Chord = {**chord, 'body': body, 'nested': nested, 'run': uuid.uuid4().hex}
        if is_repeated() and self._store.known([doc['_id']]):
            return  # a process that was killed has sent the same chord, and has done this step
        for _ in range(ATTEMPTS):
            if rev := self._put(doc):
                self._remember(group_id, {**stamp(doc, self._now(), self._lifetime), '_rev': rev})
                return
            found = self._store.current(doc['_id'])
            if found and found.get('run') == doc['run']:
                return  # it was stored, and only the response was lost
            # A frozen chord is sent a second time: its parts have the same ids as those of the first run.
            self._store.delete_all(list(self._part_revisions(group_id)))
            doc.pop('_rev', None)
            if found:
                doc['_rev'] = found['_rev']
        raise self._store.too_many_conflicts(doc['_id'])

    def drop(self, group_id: str) -> None:
        """Delete a chord whose header cannot be sent."""
        self._forget(group_id)
        self._store.delete(self._prefix + group_id)

    def set_size(self, group_id: str, size: int) -> None:
        """Store the number of parts of a chord; its last part is sent next."""
        self._change(group_id, lambda doc: {**doc, 'size': size})

    def add(self, group_id: str, task_id: str) -> None:
        """Add a task to the parts of a chord."""
        self._change(
            group_id, lambda doc: {**doc, 'added': [*(old for old in doc['added'] if old != task_id), task_id]}
        )

    def _change(self, group_id: str, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        doc_id = self._prefix + group_id
        for _ in range(ATTEMPTS):
            doc = self._known.pop(group_id, None) or self._store.current(doc_id)
            if doc is None and is_repeated() and self._store.known([doc_id]):
                return  # the chord was completed and deleted
            if self._put(change(doc or new_chord(doc_id))):
                return
        raise self._store.too_many_conflicts(doc_id)

    # -- parts

    def new_part(
        self,
        group_id: str,
        index: int | None,
        task_id: str,
        state: str,
        value: Packed | None,
        request: Packed | None = None,
    ) -> ChordPart:
        """Return the document of a part, without storing it.

        `index` is its position in the header. `value` is its encoded result, or None if the result is stored under the
        id of the task. `request` is the encoded request of the task, or None if it is too large.
        """
        position = f'{_LAST_INDEX if index is None else index:08d}'
        part: ChordPart = {
            '_id': f'{self._prefix}{group_id}:part:{position}:{task_id}',
            'type': 'Part',
            'task_id': task_id,
            'index': index,
            'state': state,
        }
        if value:
            part['value'] = value
        if request:
            part['request'] = request
        return stamp(part, self._now(), self._lifetime)

    def store_part(self, part: ChordPart, shorter: Shorter | None = None) -> None:
        """Store a part, unless it is stored already; `shorter` as in `ResultStore.write`."""
        self._store.write(part, shorter=shorter)

    def keep_value(self, part_id: str, task_id: str, state: str, value: Packed) -> None:
        """Store the value of a result in its part, unless the chord was completed: the result is deleted next."""
        if not part_id.startswith(self._prefix):
            return
        new: ChordPart = {'_id': part_id, 'type': 'Part', 'task_id': task_id, 'index': None, 'state': state}
        for _ in range(ATTEMPTS):
            part = self._store.current(part_id)
            if part is None and self._store.known([part_id]):
                return
            # Without a part, its worker is about to store it: that will be in conflict, and change nothing.
            if self._put({**(part or new), 'state': state, 'value': value}):
                return
        raise self._store.too_many_conflicts(part_id)

    def parts(self, group_id: str, *, ordered: bool) -> list[Document]:
        """Return the parts of a chord in the order of its header, or else in the order in which they were stored."""
        rows = self._store.id_range(f'{self._prefix}{group_id}:part:', docs=True)
        docs = [row['doc'] for row in rows if row.get('doc')]
        return docs if ordered else sorted(docs, key=lambda doc: doc['date'] if number(doc.get('date')) else 0.0)

    # -- completion

    def is_complete(self, group_id: str, parts: Sequence[str]) -> bool:
        """Tell whether all parts of a chord are stored, and nobody has claimed it yet.

        `parts` are the ids of parts that were stored just before. If the chord was completed, they are late duplicates,
        and are deleted.
        """
        for _ in range(ATTEMPTS):
            chord = self._known.get(group_id) or self._store.current(self._prefix + group_id)
            if chord is None and self._store.known([self._prefix + group_id]):
                for part in parts:
                    self._store.delete(part)
            if chord is None or not is_sound(chord) or chord.get('claimed'):
                return False  # not sound: its size is not known while its header is sent
            self._remember(group_id, chord)
            complete = self._is_complete(group_id, size_of(chord))
            if complete is not None:
                return complete
            self._forget(group_id)  # it was completed
        return False

    def claim(self, group_id: str, *, ordered: bool, unfinished: bool = False) -> Claimed | None:
        """Claim a chord whose parts are all stored; return None if the caller has no claim. `ordered`: see `parts`.

        With `unfinished`, also one that was claimed, but has not changed for `takeover_after` seconds.
        """
        for _ in range(ATTEMPTS):
            chord = self._known.pop(group_id, None) or self._store.current(self._prefix + group_id)
            if (
                chord is None
                or not is_sound(chord)
                or (chord.get('claimed') and not (unfinished and self._is_old(chord)))
            ):
                return None
            parts = self.parts(group_id, ordered=ordered)
            if len(parts) < size_of(chord) and self._store.client.is_cluster():
                time.sleep(LAG_SECONDS)  # another process has counted them, perhaps in another node
                parts = self.parts(group_id, ordered=ordered)
            if len(parts) < size_of(chord):  # one was added
                return None
            if claimed := self._claim(chord):
                return Claimed(claimed, parts, bool(chord.get('claimed')))
        return None

    def has_claim(self, chord: Chord) -> bool:
        """Tell whether the caller still has its claim of `chord`."""
        found = self._store.current(chord['_id'])
        return found is not None and bool(found.get('claimed') == chord['claimed'])

    @contextmanager
    def renewing(self, chord: Chord) -> Iterator[None]:
        """Keep a claim for as long as the caller completes the chord: a thread writes it anew from time to time."""
        end = Event()

        def renew() -> None:
            while not end.wait(self._takeover_after / 3):
                with suppress(CouchDBError):
                    self.renew(chord)

        thread = Thread(target=renew, name='celery-couchdb-claim', daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()

    def renew(self, chord: Chord) -> None:
        """Write a claimed chord as it is now, unless another process has the claim."""
        with self._renewal:
            if rev := self._put(chord):
                chord['_rev'] = rev

    def finish(self, group_id: str, chord: Chord) -> bool:
        """Mark a claimed chord as sent and delete its documents, itself last; False if another worker has the claim."""
        self._forget(group_id)
        if not chord.get('sent'):
            rev = self._put({**chord, 'sent': True})
            if rev is None:
                return False
            chord = {**chord, '_rev': rev}
        self._store.delete_all([*self._part_revisions(group_id), chord])
        return True

    # -- for sweeps

    def unfinished(self, ids: Iterable[str]) -> Iterator[str]:
        """Yield the group ids of those chords with these document ids that the caller is to complete.

        Their workers were killed. Chords that have changed in the last `takeover_after` seconds are left out. Those
        whose body was sent are finished here.
        """
        for chord in self._store.read_many(doc_id for doc_id in ids if doc_id.startswith(self._prefix)):
            if chord is None or not is_sound(chord) or not self._is_old(chord):
                continue
            group_id = chord['_id'].removeprefix(self._prefix)
            if chord.get('sent'):
                self.finish(group_id, chord)
            elif chord.get('body') and (chord.get('claimed') or self._is_complete(group_id, size_of(chord))):
                yield group_id

    def set_aside(self, chord: Chord) -> None:
        """Keep a claimed chord that has failed until it expires: see `reopen`. Sweeps do not find it any more."""
        self._store.put({**chord, 'date': None})

    def reopen(self, group_id: str, task_id: str) -> bool:
        """Let a chord whose part `task_id` has failed wait for this part again; return False if the chord is gone.

        First the part is deleted: the chord cannot be completed before the part is stored again, whoever is killed.
        """
        for _ in range(ATTEMPTS):
            if (chord := self._store.current(self._prefix + group_id)) is None:
                return False
            parts = self.parts(group_id, ordered=True)
            failed = [part for part in parts if part.get('task_id') == task_id and part.get('state') != states.SUCCESS]
            self._store.delete_all(failed)
            # The messages of its errbacks have ids that are made of the run: another run may send them again.
            again: Any = {**chord, 'claimed': None, 'errbacks': 0, 'run': uuid.uuid4().hex}
            # A process that completes the chord just now has read the part that is deleted: it loses its claim.
            if (chord.get('date') is not None and not chord.get('claimed')) or self._put(again):
                return True  # it had not ended, or waits again
        raise self._store.too_many_conflicts(self._prefix + group_id)

    def expire(self, ids: Iterable[str], parts: Iterable[Document]) -> int:
        """Delete expired chords and parts, and return the number of deleted documents.

        A chord with a newer part gets that part's `expires` instead. Parts of existing chords are kept.
        """
        count = 0
        for chord in self._store.client.fetch([doc_id for doc_id in ids if doc_id.startswith(self._prefix)]):
            if chord is None:
                continue
            docs = self.parts(chord['_id'].removeprefix(self._prefix), ordered=True)
            newest = max(
                (doc['expires'] for doc in [*docs, chord] if isinstance(doc.get('expires'), (int, float))), default=0
            )
            if newest > self._now():
                self._store.client.bulk([{**chord, 'expires': newest}])  # after a conflict, the next sweep tries again
            else:
                count += self._store.delete_all([*docs, chord])
        chord_ids = {part['_id']: part['_id'].rpartition(':part:')[0] for part in parts}
        existing = {doc['_id'] for doc in self._store.client.fetch(sorted(set(chord_ids.values()))) if doc}
        return count + self._store.delete_all([part for part in parts if chord_ids[part['_id']] not in existing])

    # -- requests

    def _now(self) -> float:
        return self._store.client.clock.now()

    def _remember(self, group_id: str, chord: Chord) -> None:
        if len(str(chord.get('body'))) <= _MAX_REMEMBERED_BODY:
            self._known[group_id] = chord

    def _forget(self, group_id: str) -> None:
        self._known.pop(group_id, None)
        self._counted.pop(group_id, None)

    def _put(self, doc: Mapping[str, Any]) -> str | None:
        return self._store.put(stamp(doc, self._now(), self._lifetime))

    def _is_old(self, chord: Chord) -> bool:
        return chord['date'] <= self._now() - self._takeover_after

    def _claim(self, chord: Chord) -> Chord | None:
        claimed: Chord = {**chord, 'claimed': uuid.uuid4().hex}
        claimed = stamp(claimed, self._now(), self._lifetime)
        rev = self._store.claim(claimed)
        return {**claimed, '_rev': rev} if rev else None

    def _part_revisions(self, group_id: str) -> Iterator[Document]:
        for row in self._store.id_range(f'{self._prefix}{group_id}:part:'):
            yield {'_id': row['id'], '_rev': row['value']['rev']}

    def _count(self, group_id: str) -> int | None:
        """Return the number of stored parts, or None if the chord was deleted."""
        chord = self._prefix + group_id
        ids = [row['id'] for row in self._store.id_range(chord)]  # the chord sorts just before its parts
        return sum(1 for doc_id in ids if doc_id.startswith(f'{chord}:part:')) if chord in ids else None

    def _is_complete(self, group_id: str, size: int) -> bool | None:
        """Tell whether all parts are stored; None if the chord was deleted, because it was completed.

        Each part is one write, and CouchDB numbers the writes to a database. If there were fewer writes since the last
        count than parts were missing, parts are still missing. In a cluster each copy has its own numbers.
        """
        writes = None
        if self._store.client.is_cluster():
            count = self._count(group_id)
            if count is not None and 0 < size - count <= _MAX_LATE_PARTS:
                time.sleep(LAG_SECONDS)  # a copy does not tell whether it has received all writes
                count = self._count(group_id)
        else:
            if size > _MAX_SMALL_CHORD:
                writes = self._store.writes()
                last_count, writes_then = self._counted.get(group_id, (0, writes - size))
                if writes - writes_then < size - last_count:
                    return False
            count = self._count(group_id)
        if count is None:
            return None
        if writes is not None:
            self._counted[group_id] = (count, writes)
        return count >= size


def size_of(chord: Chord) -> int:
    """Return the number of parts of a chord whose size is known, with those that were added."""
    return (chord['size'] or 0) + len(chord['added'])


_has_sound_members = members(
    size=lambda size: isinstance(size, int) and size > 0,
    added=items(anything),
    date=number,
    body=maybe(members()),
    claimed=maybe(text),
    errbacks=maybe(number),
)


def is_sound(doc: Mapping[str, Any]) -> TypeGuard[Chord]:
    """Tell whether a document is a chord whose size is known, and was not changed by hand into something malformed."""
    return _has_sound_members(doc)
