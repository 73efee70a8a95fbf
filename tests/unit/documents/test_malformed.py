"""Which items are malformed (`kombu_couchdb.documents.validation`)."""

from __future__ import annotations

from typing import Any

import pytest

from kombu_couchdb.documents import validation

from .test_workitem import item, message, nested


@pytest.mark.parametrize(
    ('spoilt', 'named'),
    [
        ({'message': None}, 'message'),
        ({'message': {**message(), 'properties': []}}, 'message.properties'),
        ({'message': {**message(), 'headers': 'none'}}, 'message.headers'),
        ({'message': {**message(), 'body': {}}}, 'message.body'),
        ({'message': message(delivery_info='here')}, 'delivery_info'),
        ({'claimed': {}}, 'claimed'),
        ({'claimed': {'by': 7}}, 'claimed'),
        ({'attempts': None}, 'attempts'),
        ({'attempts': True}, 'attempts'),
        ({'attempts': -1}, 'attempts'),
        ({'date': 'tomorrow'}, 'date'),
    ],
)
def test_flaw_names_the_member(spoilt: dict[str, Any], named: str) -> None:
    sentence = validation.flaw(item(**spoilt))
    assert sentence is not None
    assert named in sentence
    assert sentence.startswith('malformed: ')


@pytest.mark.parametrize('place', ['headers', 'properties', 'message', 'item', 'next'])
def test_deep_nesting_is_a_flaw(place: str) -> None:
    deep, fit = (item(message={**message(), 'headers': {}, 'properties': {}}) for _ in range(2))
    for doc, levels in ((deep, 600), (fit, 90)):
        inner = {
            'headers': doc['message']['headers'],
            'properties': doc['message']['properties'],
            'message': doc['message'],
            'item': doc,
            'next': doc,
        }[place]
        inner['next' if place == 'next' else 'x'] = nested(levels)
    assert validation.flaw(fit) is None
    assert validation.flaw(deep) == 'malformed: it is nested in more than 110 levels'
