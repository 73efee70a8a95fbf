"""The most harmful documents that a member of a database can write.

They are JSON texts, because Python cannot encode all of them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from typing import Any

from .documents import BROKER, RESULTS

__all__ = ['HARD_TO_STORE', 'LARGEST', 'broker_texts', 'deep', 'result_texts', 'store']

#: The largest numbers that CouchDB stores. It refuses requests with larger ones.
LARGEST: list[Any] = [
    1.7976931348623157e308,
    -1.7976931348623157e308,
    int(1.7976931348623157e308),
    -int(1.7976931348623157e308),
]

#: Levels of nesting: more than are needed, more than a recursive function with two calls per level can descend, about
#: as many as Python can parse, and more. CouchDB 3.5 cannot index a document with about 10,000 levels.
_LEVELS = {150: 'list', 600: 'object', 1500: 'list', 5000: 'object'}
_EDGE = range(900, 1000, 8)

#: The placeholder for a deeply nested value in a document.
_HERE = '@here@'

#: Members that CouchDB refuses at the top level of a document, but stores at deeper levels.
HARD_TO_STORE: dict[str, Any] = {
    '_foo': 1,
    '_deleted': True,
    '_attachments': 5,
    '_conflicts': ['x'],
    '_id': 5,
    '_rev': 'x',
}


def deep(levels: int, kind: str = 'list') -> str:
    """Return a JSON text with this number of nested levels."""
    return '[' * levels + ']' * levels if kind == 'list' else '{"a":' * levels + '{}' + '}' * levels


def _texts(kind: dict[str, Any], path: str, levels: Iterable[int]) -> list[str]:
    """Return a document for each depth, with a nested value at this path."""
    found = []
    for depth in levels:
        doc = copy.deepcopy(kind)
        doc['_id'] += f' {path} {depth}'
        inner: Any = doc
        *steps, last = path.split('.')
        for step in steps:
            inner = inner[int(step)] if step.isdecimal() else inner[step]
        inner[last] = _HERE
        found.append(json.dumps(doc).replace(f'"{_HERE}"', deep(depth, _LEVELS.get(depth, 'list'))))
    return found


def _largest(kinds: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return documents with one of the largest numbers in place of each number or null."""
    return [
        {**kind, '_id': f'{kind["_id"]} {member} {number}', member: value}
        for number, value in enumerate(LARGEST)
        for kind in kinds.values()
        for member, old in kind.items()
        if isinstance(old, (int, float)) or old is None
    ]


def broker_texts(queue: str, most: int) -> list[str]:
    """Return the documents for a broker's database with this queue, with at most `most` levels."""
    texts, levels = [], [depth for depth in _LEVELS if depth <= most]
    for kind in BROKER.values():
        paths = ['x', *(name for name in ('exchange', 'queues', 'rates', 'routing_key') if name in kind)]
        paths += ['message.headers.x', 'message.properties.x', 'message.x'] if 'message' in kind else []
        paths += ['next.0.x', 'next.0.message.headers.x'] if 'next' in kind else []
        paths += ['arguments.x'] if 'arguments' in kind else []
        for path in paths:
            texts += _texts(kind, path, [*levels, *_EDGE] if path == 'message.headers.x' else levels)
    docs = _largest(BROKER)
    attached = {'body': {'content_type': 'text/plain', 'data': 'aGVsbG8='}, 'other': {'data': 'aGVsbG8='}}
    for name in ('waiting', 'unique', 'unique, claimed'):
        kind = BROKER[name]
        after = {**kind.get('next', [{}])[0], **HARD_TO_STORE}
        docs += [
            {**kind, '_id': kind['_id'] + ' next', 'key': 'k', 'next': [HARD_TO_STORE]},
            {**kind, '_id': kind['_id'] + ' nextmessage', 'key': 'k', 'next': [after]},
            {**kind, '_id': kind['_id'] + ' attached', '_attachments': attached},
        ]
    # Almost as large as `max_document_size` allows.
    large = 'x' * 7_998_400
    docs += [{**BROKER[name], '_id': BROKER[name]['_id'] + ' large', 'x': large} for name in ('waiting', 'claimed')]
    texts += list(map(json.dumps, docs))
    name = json.dumps(queue)
    return [
        text.replace('"queue": "q"', f'"queue": {name}').replace('"queues": ["q"]', f'"queues": [{name}]')
        for text in texts
    ]


def result_texts(most: int) -> list[str]:
    """Return the documents for a result database, with at most `most` levels."""
    levels = [depth for depth in _LEVELS if depth <= most]
    texts = [text for kind in RESULTS.values() for text in _texts(kind, 'x', levels)]
    for name, path in (('result', 'value.result'), ('group', 'value.x'), ('chord', 'body.x'), ('part', 'value.x')):
        texts += _texts(RESULTS[name], path, levels)
    return texts + list(map(json.dumps, _largest(RESULTS)))


def store(client: Any, texts: list[str]) -> None:
    """Store documents given as JSON texts."""
    texts = list({text.partition('", "type"')[0]: text for text in texts}.values())
    while texts:
        size = 0
        part: list[str] = []
        while texts and (not part or size + len(texts[0]) < 1_000_000):
            size += len(texts[0])
            part.append(texts.pop(0))
        answers = client.request('POST', '/_bulk_docs', body=('{"docs":[' + ','.join(part) + ']}').encode())
        assert not [answer for answer in answers if answer.get('error')]
