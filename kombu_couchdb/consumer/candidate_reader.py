"""Reads what the windows of a connection need, of all its queues together: pages of the view, and documents to be claimed."""

from __future__ import annotations

from collections.abc import Mapping

from ..couchdb.client import Client, Document
from ..documents import workitem
from ..queues import waiting
from .candidates import Candidate, QueueCandidates

__all__ = ['CandidateReader']

#: So many documents are read in one request, for those that are claimed next: at first, and at the most, if they are small: no
#: more than so many characters of bodies, if they are as large as those read last.
_FIRST, _DOCUMENTS, _CHARACTERS = 8, 128, 1_000_000

#: Queues that are read in one request.
_QUEUES = 50


class CandidateReader:
    """Takes from windows what can be claimed; for the I/O thread alone."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._documents = _FIRST

    def take(self, candidates: Mapping[str, QueueCandidates], wanted: Mapping[str, int]) -> dict[str, list[Document]]:
        """Return up to as many documents of each queue as are `wanted`, next first; they are candidates no more."""
        taken: dict[str, list[Document]] = {queue: [] for queue in wanted}
        self._choose(candidates, wanted, taken)
        # What was read ahead did not suffice: there may be more in the view.
        lacking = [queue for queue, count in wanted.items() if len(taken[queue]) < count and candidates[queue].is_stale]
        if lacking:
            self.refill([candidates[queue] for queue in lacking])
            self._choose(candidates, {queue: wanted[queue] for queue in lacking}, taken)
        return taken

    def refill(self, candidates: list[QueueCandidates]) -> None:
        """Read the view for these windows in one request, and in a second for those that need another page."""
        for _ in range(2):
            candidates = self._read_pages(candidates)
            if not candidates:
                return

    def _read_pages(self, candidates: list[QueueCandidates]) -> list[QueueCandidates]:
        """Read a page for each window and return those that need another."""
        again: list[QueueCandidates] = []
        readings = [(queue_candidates, queue_candidates.reading()) for queue_candidates in candidates]
        until = self._client.clock.now() + waiting.HORIZON_SECONDS
        for update in ('true', 'lazy', 'false'):
            alike = [(queue_candidates, reading) for queue_candidates, reading in readings if reading.update == update]
            for start in range(0, len(alike), _QUEUES):
                part = alike[start : start + _QUEUES]
                pages = waiting.read(self._client, [reading.ask for _, reading in part], until, update=update)
                again += [
                    queue_candidates
                    for (queue_candidates, reading), page in zip(part, map(self._usable, pages), strict=True)
                    if not queue_candidates.absorb(reading, page)
                ]
        return again

    def _usable(self, page: waiting.Page) -> waiting.Page:
        """Return a page without what nobody can use, and what would be read for nothing."""
        return page._replace(rows=[row for row in page.rows if not self._client.unusable.has(row.id, row.rev)])

    def _choose(
        self, candidates: Mapping[str, QueueCandidates], wanted: Mapping[str, int], taken: dict[str, list[Document]]
    ) -> None:
        while True:
            chosen = {
                queue: found
                for queue, count in wanted.items()
                if (found := candidates[queue].choose(count - len(taken[queue]), others=not taken[queue]))
            }
            if not chosen:
                return
            self._read_documents(candidates, chosen)
            for queue, found in chosen.items():
                taken[queue] += [
                    doc
                    for doc in candidates[queue].accept(found)
                    if not self._client.unusable.has(doc['_id'], doc['_rev'])
                ]

    def _read_documents(self, candidates: Mapping[str, QueueCandidates], chosen: Mapping[str, list[Candidate]]) -> None:
        """Read the documents that are claimed now, as far as they are not known, and of some that follow in the same request."""
        unread = [
            candidate
            for queue, found in chosen.items()
            for candidate in found
            if candidate.doc is None or candidates[queue].is_conflicted(candidate)
        ]
        if not unread:
            return
        count = self._documents
        spare = max(0, count - len(unread)) // len(chosen)
        for queue in chosen:
            unread += candidates[queue].unread(spare)
        self._documents = max(1, count // 2)  # should it take longer than a request may, the next try reads fewer
        for candidate, doc in zip(unread, self._client.fetch([candidate.id for candidate in unread]), strict=True):
            candidate.note(doc)
        largest = max((workitem.size(candidate.doc) for candidate in unread if candidate.doc), default=0)
        self._documents = max(1, min(2 * max(count, len(unread)), _DOCUMENTS, _CHARACTERS // max(1, largest)))
