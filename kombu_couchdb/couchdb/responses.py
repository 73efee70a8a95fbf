"""The JSON of responses, without the documents that Python cannot decode, and a registry of unusable documents.

Python's decoder recurses, and so cannot read a document with very many levels, which CouchDB stores. Every response is
decoded here, so a response with such a document is read like one without it, and the document is noted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from ..log import get_logger

logger = get_logger(__name__)

#: The maximum number of documents in the registry.
_MAX_DOCS = 10_000

#: The parts of JSON that tell where a document begins and ends, as CouchDB writes it: the member that contains it with
#: its opening brace, its id, other strings, and brackets.
_PARTS = re.compile(
    rb'"(?:doc|ok)":\s*(?P<doc>\{)|"_id":\s*(?P<id>"(?:[^"\\]|\\.)*")|"(?:[^"\\]|\\.)*"|(?P<open>[\[{])|(?P<close>[\]}])'
)

#: The levels of documents: with `open_revs`, in the rows of views, `_all_docs` and `_changes`, and from `_bulk_get`.
_DOC_LEVELS = (3, 4, 6)


def decoded(text: bytes, skip: Callable[[str], None]) -> Any:
    """Return the JSON in `text`, with null for each document that cannot be decoded; call `skip` with its id.

    *Raises* `ValueError` for other text; `RecursionError` if the whole response is such a document.
    """
    try:
        return json.loads(text)
    except RecursionError:
        unreadable = _unreadable(text)
        if not unreadable:
            raise
    kept, end = list[bytes](), 0
    for begin, after, _ in unreadable:
        kept += [text[end:begin], b'null']
        end = after
    found = json.loads(b''.join([*kept, text[end:]]))
    for _, _, doc_id in unreadable:
        skip(json.loads(doc_id))
    return found


def _unreadable(text: bytes) -> list[tuple[int, int, bytes]]:
    """Return begin, end and id of each document in a response that cannot be decoded."""
    found = list[tuple[int, int, bytes]]()
    level = start = doc_level = 0
    doc_id = b''
    for part in _PARTS.finditer(text):
        if part['doc'] or part['open']:
            level += 1
            if part['doc'] and not doc_level and level in _DOC_LEVELS:
                start, doc_level, doc_id = part.start('doc'), level, b''
        elif part['id']:
            if level == 1:
                return []  # the response is a document
            doc_id = part['id'] if level == doc_level else doc_id
        elif part['close']:
            if level == doc_level:
                doc_level = 0
                if doc_id and not _is_readable(text[start : part.end()]):
                    found.append((start, part.end(), doc_id))
            level -= 1
    return found


def _is_readable(doc: bytes) -> bool:
    try:
        json.loads(b'[' * max(_DOC_LEVELS) + doc + b']' * max(_DOC_LEVELS))
    except RecursionError:
        return False
    return True


class Unusable:
    """The unusable documents of one database. Thread-safe."""

    def __init__(self) -> None:
        #: By document id, the revision; None: the document cannot be read.
        self._known: dict[str, str | None] = {}
        self._new: list[tuple[str, str]] = []

    def note(self, doc_id: str, rev: str | None, reason: str) -> None:
        """Record an unusable document and log it once: it cannot be written with this revision, or (None) not be read.

        `reason` is the end of a sentence in the log.
        """
        known = self.has(doc_id, rev)
        self._known[doc_id] = rev
        if known:
            return
        if len(self._known) > _MAX_DOCS:
            self._known.pop(next(iter(self._known)), None)
        self._new.append((doc_id, reason))
        logger.error('document %s is skipped: %s', doc_id, reason)

    def forget(self, doc_id: str) -> None:
        """Remove a document that was replaced."""
        self._known.pop(doc_id, None)
        self._new = [(name, reason) for name, reason in self._new if name != doc_id]

    def has(self, doc_id: str, rev: str | None) -> bool:
        """Return whether `note` was called with this id and revision."""
        return self._known.get(doc_id, '') == rev

    def take(self) -> list[tuple[str, str]]:
        """Return the ids and reasons that were recorded since the last call."""
        new, self._new = self._new, []
        return new
