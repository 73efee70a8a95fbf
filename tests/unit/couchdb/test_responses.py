"""The JSON of responses (`kombu_couchdb.couchdb.responses`) with documents that Python cannot decode."""

from __future__ import annotations

from typing import Any

import pytest

from kombu_couchdb.couchdb.responses import decoded

#: A value with more levels than Python decodes.
DEEP = b'[' * 200_000 + b']' * 200_000

#: A document with this value, whose strings look like the begin of other documents.
TOO_DEEP = rb'{"_id":"a\"b","_rev":"1-a","text":"\"doc\":{\\","in":{"_id":"c","doc":{"x":' + DEEP + b'}}}'
PLAIN = b'{"_id":"d","_rev":"1-d","list":[{"doc":{}}]}'
KNOWN: Any = {'_id': 'd', '_rev': '1-d', 'list': [{'doc': {}}]}


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        (b'{"rows":[{"id":"x","doc":%s},{"doc":%s}]}', {'rows': [{'id': 'x', 'doc': None}, {'doc': KNOWN}]}),
        (b'{"results":[{"docs":[{"ok":%s},{"ok": %s}]}]}', {'results': [{'docs': [{'ok': None}, {'ok': KNOWN}]}]}),
        (b'[{"ok":%s},{"ok":%s}]', [{'ok': None}, {'ok': KNOWN}]),
    ],
    ids=['rows', 'bulk_get', 'open_revs'],
)
def test_a_document_that_is_nested_too_deeply_is_null(text: bytes, expected: Any) -> None:
    skipped = list[str]()
    assert decoded(text % (TOO_DEEP, PLAIN), skipped.append) == expected
    assert skipped == ['a"b']


@pytest.mark.parametrize(
    'text', [TOO_DEEP, DEEP, b'{"rows":[{"value":%s}]}' % DEEP, b'{"rows":[{"value":{"doc":%s}}]}' % TOO_DEEP]
)
def test_a_response_that_is_nested_too_deeply_itself_cannot_be_decoded(text: bytes) -> None:
    with pytest.raises(RecursionError):
        decoded(text, pytest.fail)


def test_a_response_that_is_no_json_is_a_value_error() -> None:
    with pytest.raises(ValueError, match='Expecting'):
        decoded(b'{"rows":[', pytest.fail)
