"""The quarantine: documents that cannot be written or indexed are set aside, so that they stop nobody.

Messages whose documents cannot be written back become dead letters. Such a document is not decoded. The members of a
dead letter are appended to its JSON text: if a name appears twice, CouchDB keeps the last member.

While a document that ends CouchDB's view server is in a database, none of the views of this database responds.

CouchDB does not report the id of such a document (seen with 3.5). One that is nested in 20,000 levels ends the process
of the view server; one with millions of lists needs more time than the view server has. So `Harmful` reads the
documents, the latest ones first, looks for these two kinds, and replaces what it finds.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf

from ..couchdb.bulk import BATCH_DOCS
from ..couchdb.client import Client, Document, chunks
from ..couchdb.http import encoded
from ..couchdb.shapes import CHANGES, DOCUMENT
from ..documents import dead_letter
from ..documents.dead_letter import malformed
from ..documents.ids import BROKER
from ..errors import Conflict, DocumentTooLarge, NotFound, RequestRefused
from ..log import get_logger
from ..values import nesting

logger = get_logger(__name__)

#: How many of the latest documents are read first.
_LATEST_DOCS = 1000

#: If the views fail, documents with more levels are replaced (of a response, the client decodes 200), or the one with
#: the most lists and objects, if it has more of them than this.
_MAX_LEVELS, _MAX_CONTAINERS = 190, 300_000

#: The longest random pause before all documents are read, because other workers look for the same document. After
#: `_AGAIN_SECONDS` a database in which nothing was found is searched again.
_PAUSE_SECONDS, _AGAIN_SECONDS = 20.0, 600.0

#: The type of a WorkItem in CouchDB's JSON.
_ITEM = b'"type":"WorkItem"'

#: The name of its queue.
_QUEUE = re.compile(rb'"queue":("(?:[^"\\]|\\.)*")')

_TOO_DEEP = 'it is nested too deeply for the views of CouchDB; its content was removed'
_TOO_MANY = f'it has more than {_MAX_CONTAINERS:,} lists and objects, too many for the views; its content was removed'


def dead_letter_members(text: bytes, reason: str, now: float) -> Document | None:
    """Return a dead letter without a message for a WorkItem whose JSON is `text`; None for another document."""
    if _ITEM not in text:
        return None
    queue = _QUEUE.search(text)
    return {
        'type': 'WorkItem',
        'queue': json.loads(queue[1]) if queue else None,
        'attempts': 0,
        'published': now,
        **dead_letter.members(malformed(reason), now),
    }


def set_aside(client: Client) -> None:
    """Make dead letters of the messages found unusable since the last call: up to two requests each.

    *Raises* the errors of `Client`; an error that only concerns one message is logged instead.
    """
    for doc_id, reason in client.unusable.take():
        if doc_id.startswith(BROKER):
            continue  # not a WorkItem
        try:
            text = client.raw(doc_id)
            if _ITEM in text:
                members = {'claimed': None, **dead_letter.members(malformed(reason), client.clock.now())}
                client.put({'_id': doc_id}, text=text[:-1] + b',' + encoded(members)[1:])
                logger.error('message %s was made a dead letter: %s', doc_id, reason)
        except (Conflict, NotFound):
            pass  # another process has changed or deleted it
        except (DocumentTooLarge, RequestRefused) as exc:
            logger.error('message %s cannot be made a dead letter: %s', doc_id, exc)


class Harmful:
    """Replaces the harmful documents of one database. Use it in one thread."""

    def __init__(self, client: Client, members_of: Callable[[bytes, str, float], Document | None]) -> None:
        """`members_of(text, reason, now)` returns the new members of a document with this JSON; None deletes it."""
        self._client, self._members_of = client, members_of
        self._seen, self._not_before = client.failed_views, -inf
        self._batches: Iterator[Sequence[str]] | None = None
        self._heaviest = (_MAX_CONTAINERS, '')

    def replace(self, seconds: float = inf) -> None:
        """Look for harmful documents if a view has failed, for about `seconds`, and replace them.

        Call it again and again; no request while no view fails. *Raises* the errors of `Client`.
        """
        if self._client.failed_views == self._seen or time.monotonic() < self._not_before:
            return
        until = time.monotonic() + seconds
        self._batches = self._batches or self._all_ids()
        for ids in self._batches:
            found = dict.fromkeys(self._too_deep(ids), _TOO_DEEP)
            if not ids and self._heaviest[1]:
                found = {self._heaviest[1]: _TOO_MANY}
            for doc_id, reason in found.items():
                self._replace(doc_id, reason)
            if found:
                self._start_again()
            if found or time.monotonic() > until or time.monotonic() < self._not_before:
                return
        logger.error('%s: no document was found because of which the views fail', self._client.url)
        self._start_again()
        self._not_before = time.monotonic() + _AGAIN_SECONDS

    def _start_again(self) -> None:
        self._batches, self._heaviest = None, (_MAX_CONTAINERS, '')
        self._seen = self._client.failed_views

    def _all_ids(self) -> Iterator[Sequence[str]]:
        """Yield the ids of the latest documents, then those of all; an empty list at the end of each."""
        params = {'descending': True, 'limit': _LATEST_DOCS}
        latest = self._client.request('GET', '/_changes', params, repeat=True, shape=CHANGES)['results']
        yield from chunks([row['id'] for row in latest], BATCH_DOCS)
        yield []
        self._not_before = time.monotonic() + random.uniform(0, _PAUSE_SECONDS)
        yield []
        after = None
        while rows := self._client.id_range('', limit=_LATEST_DOCS, after=after):
            after = rows[-1]['id']
            yield from chunks([row['id'] for row in rows], BATCH_DOCS)
        yield []

    def _too_deep(self, ids: Sequence[str]) -> list[str]:
        """Return the ids of those documents that are nested too deeply, and remember the largest of the others."""
        found = []
        for doc_id, doc in zip(ids, self._client.fetch(ids) if ids else (), strict=True):
            levels, containers = nesting(doc)
            if levels > _MAX_LEVELS:
                found.append(doc_id)
            self._heaviest = max(self._heaviest, (containers, doc_id))
        return found

    def _replace(self, doc_id: str, reason: str) -> None:
        now = self._client.clock.now()
        try:
            text = self._client.raw(doc_id)
            members = None if doc_id.startswith(BROKER) else self._members_of(text, reason, now)
            rev = self._client.decode(text, shape=DOCUMENT)['_rev']
            self._client.put({'_id': doc_id, '_rev': rev, **({'_deleted': True} if members is None else members)})
        except (Conflict, NotFound):
            return  # another worker was faster
        logger.error('document %s of %s made the views fail and was replaced: %s', doc_id, self._client.url, reason)
