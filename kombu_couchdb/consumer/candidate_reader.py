"""The candidate reader: reads pages of the view and the documents to be claimed, for all queues together."""

from __future__ import annotations

from collections.abc import Mapping

from ..couchdb.client import Client, Document
from ..documents import workitem
from ..queues import waiting
from .candidates import Candidate, QueueCandidates

__all__ = ['CandidateReader']

#: How many documents one request reads, at first and at most, if it does not need more to claim them at once: it also
#: reads the candidates that follow, up to this number.
_FIRST_DOCS, _MAX_DOCS = 8, 128

#: The number of following candidates that a request reads is limited so that it has at most this many characters of
#: bodies, if each document is as large as the largest of the last request.
_MAX_CHARACTERS = 1_000_000

#: The most queues that one request reads.
_MAX_QUEUES = 50


class CandidateReader:
    """Reads the messages that can be claimed; for the I/O thread alone."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._docs_per_read = _FIRST_DOCS

    def take(self, candidates: Mapping[str, QueueCandidates], wanted: Mapping[str, int]) -> dict[str, list[Document]]:
        """Return up to `wanted` documents of each queue, in the order of the claims, and remove their candidates."""
        taken: dict[str, list[Document]] = {queue: [] for queue in wanted}
        self._choose(candidates, wanted, taken)
        # The candidates were not enough, and the view may have more. The head is read in the next cycle, after the
        # notifier has noted an update sequence.
        lacking = [
            queue
            for queue, count in wanted.items()
            if len(taken[queue]) < count and candidates[queue].is_stale and not candidates[queue].reads_head_next
        ]
        if lacking:
            self.refill([candidates[queue] for queue in lacking])
            self._choose(candidates, {queue: wanted[queue] for queue in lacking}, taken)
        return taken

    def refill(self, candidates: list[QueueCandidates]) -> None:
        """Read the view for these queues in one request, and again for the queues that need a second page."""
        for _ in range(2):
            candidates = self._read_pages(candidates)
            if not candidates:
                return

    def _read_pages(self, candidates: list[QueueCandidates]) -> list[QueueCandidates]:
        """Read a page of each queue and return the queues that need another one."""
        again: list[QueueCandidates] = []
        readings = [(queue_candidates, queue_candidates.next_reading()) for queue_candidates in candidates]
        until = self._client.clock.now() + waiting.HORIZON_SECONDS
        for update in ('true', 'lazy', 'false'):
            alike = [(queue_candidates, reading) for queue_candidates, reading in readings if reading.update == update]
            for start in range(0, len(alike), _MAX_QUEUES):
                part = alike[start : start + _MAX_QUEUES]
                pages = waiting.read(self._client, [reading.ask for _, reading in part], until, update=update)
                again += [
                    queue_candidates
                    for (queue_candidates, reading), page in zip(part, map(self._usable, pages), strict=True)
                    if not queue_candidates.add_page(reading, page)
                ]
        return again

    def _usable(self, page: waiting.Page) -> waiting.Page:
        """Return a page without the messages whose claims CouchDB will always refuse."""
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
                    for doc in candidates[queue].claimable(found)
                    if not self._client.unusable.has(doc['_id'], doc['_rev'])
                ]

    def _read_documents(self, candidates: Mapping[str, QueueCandidates], chosen: Mapping[str, list[Candidate]]) -> None:
        """Read the chosen documents that are not read, or that others may have claimed, and some that follow."""
        unread = [
            candidate
            for queue, found in chosen.items()
            for candidate in found
            if candidate.doc is None or candidates[queue].may_be_claimed(candidate)
        ]
        if not unread:
            return
        count = self._docs_per_read
        spare = max(0, count - len(unread)) // len(chosen)
        for queue in chosen:
            unread += candidates[queue].without_doc(spare)
        self._docs_per_read = max(1, count // 2)  # if the request takes too long and fails, the next one reads fewer
        for candidate, doc in zip(unread, self._client.fetch([candidate.id for candidate in unread]), strict=True):
            candidate.note(doc)
        largest = max((workitem.size(candidate.doc) for candidate in unread if candidate.doc), default=0)
        self._docs_per_read = max(1, min(2 * max(count, len(unread)), _MAX_DOCS, _MAX_CHARACTERS // max(1, largest)))
