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


def _texts(
    name: str, kinds: dict[str, dict[str, Any]], places: dict[str, tuple[str, ...]], levels: Iterable[int]
) -> list[str]:
    """Return a document for each place and depth, with a nested value in that place."""
    found = []
    for kind, path in places.items():
        for depth in levels:
            doc = copy.deepcopy(kinds[name])
            doc['_id'] += f' {kind} {depth}'
            inner: Any = doc
            for step in path[:-1]:
                inner = inner[int(step)] if step.isdecimal() else inner[step]
            inner[path[-1]] = _HERE
            found.append(json.dumps(doc).replace(f'"{_HERE}"', deep(depth, _LEVELS.get(depth, 'list'))))
    return found


def broker_texts(queue: str, most: int) -> list[str]:
    """Return the documents for a broker's database with this queue, with at most `most` levels."""
    anywhere = {
        'headers': ('message', 'headers', 'x'),
        'properties': ('message', 'properties', 'x'),
        'top': ('x',),
        'message': ('message', 'x'),
    }
    texts, levels = [], [depth for depth in _LEVELS if depth <= most]
    for name in ('waiting', 'scheduled', 'claimed', 'expired', 'unique', 'unique, claimed', 'dead'):
        texts += _texts(name, BROKER, anywhere, levels)
    texts += _texts(
        'unique', BROKER, {'next': ('next', '0', 'message', 'headers', 'x'), 'nexttop': ('next', '0', 'x')}, levels
    )
    texts += _texts('unique, claimed', BROKER, {'next': ('next', '0', 'message', 'headers', 'x')}, levels)
    texts += _texts('broadcast', BROKER, {**anywhere, 'to': ('exchange',)}, levels)
    texts += _texts('consumer', BROKER, {'top': ('x',), 'queues': ('queues',), 'rates': ('rates',)}, levels)
    texts += _texts('queue', BROKER, {'top': ('x',), 'arguments': ('arguments', 'x')}, levels)
    texts += _texts('binding', BROKER, {'top': ('x',), 'key': ('routing_key',)}, levels)
    for name in ('waiting', 'claimed', 'unique'):
        texts += _texts(name, BROKER, {'headers': ('message', 'headers', 'x')}, _EDGE)
    docs = []
    for number, value in enumerate(LARGEST):
        for name in ('waiting', 'scheduled', 'claimed', 'unique', 'unique, claimed', 'consumer', 'queue', 'broadcast'):
            kind = BROKER[name]
            docs += [
                {**kind, '_id': f'{kind["_id"]} {member} {number}', member: value}
                for member, old in kind.items()
                if isinstance(old, (int, float)) or old is None
            ]
    for name in ('waiting', 'unique', 'unique, claimed'):
        kind = BROKER[name]
        docs += [
            {**kind, '_id': kind['_id'] + ' next', 'key': 'k', 'next': [HARD_TO_STORE]},
            {
                **kind,
                '_id': kind['_id'] + ' nextmessage',
                'key': 'k',
                'next': [{**kind['next'][0], **HARD_TO_STORE}] if 'next' in kind else [HARD_TO_STORE],
            },
            {
                **kind,
                '_id': kind['_id'] + ' attached',
                '_attachments': {
                    'body': {'content_type': 'text/plain', 'data': 'aGVsbG8='},
                    'other': {'data': 'aGVsbG8='},
                },
            },
        ]
    # Almost as large as `max_document_size` allows.
    docs += [
        {**BROKER[name], '_id': f'{BROKER[name]["_id"]} large', 'x': 'x' * 7_998_400} for name in ('waiting', 'claimed')
    ]
    texts += list(map(json.dumps, docs))
    name = json.dumps(queue)
    return [
        text.replace('"queue": "q"', f'"queue": {name}').replace('"queues": ["q"]', f'"queues": [{name}]')
        for text in texts
    ]


def result_texts(most: int) -> list[str]:
    """Return the documents for a result database, with at most `most` levels."""
    texts, levels = [], [depth for depth in _LEVELS if depth <= most]
    for name in ('result', 'group', 'chord', 'chord, claimed', 'part'):
        value = 'value' if 'value' in RESULTS[name] else 'body'
        texts += _texts(name, RESULTS, {'top': ('x',), 'value': (value, 'x')}, levels)
    texts += _texts('result', RESULTS, {'result': ('value', 'result')}, levels)
    docs = [
        {**RESULTS[name], '_id': f'{RESULTS[name]["_id"]} {member} {number}', member: value}
        for number, value in enumerate(LARGEST)
        for name in RESULTS
        for member, old in RESULTS[name].items()
        if isinstance(old, (int, float))
    ]
    return texts + list(map(json.dumps, docs))


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
