"""One property per schema: what its type allows is accepted, and one wrong member is named in a sentence."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Literal, TypedDict

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from celery_couchdb.contrib.beat.entries import Schedule, ScheduleState
from celery_couchdb.contrib.metrics.history import TenMinutes
from kombu_couchdb.documents import shared_documents as shared
from kombu_couchdb.documents.types import DoneItem, WorkItem
from kombu_couchdb.documents.validation import MAX_LEVELS, malformed_reason
from kombu_couchdb.schema import Schema
from kombu_couchdb.values import nesting
from tests.hostile.strategies import spoilt, valid

KINDS: list[Any] = [
    *(WorkItem, DoneItem, Schedule, ScheduleState, shared.Consumer, shared.Slot, shared.Rate, shared.Queue),
    *(shared.Pause, shared.Binding, shared.FanoutExchange, shared.Notice, shared.Bell, shared.Leader),
    *(shared.Broadcast, TenMinutes),
]


@pytest.mark.parametrize('kind', KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_wrong_member_is_named_and_left_out(kind: Any, data: st.DataObject) -> None:
    schema = Schema.of(kind)
    doc = {'_id': 'a', 'mine': [1], **data.draw(valid(schema))}
    assert schema.problem('', doc) is None
    assert schema.clean(doc) == doc
    member, wrong = data.draw(spoilt(schema, doc))
    kept = deepcopy(wrong)
    problem = schema.problem('', wrong)
    assert problem is not None
    assert problem.startswith((f'{member} must be ', f'{member}.', f'{member} is missing'))
    cleaned = schema.clean(wrong)
    assert wrong == kept
    assert cleaned['mine'] == [1]
    assert (schema.problem('', cleaned) or ' is missing').endswith(' is missing')


@given(data=st.data())
def test_item_is_delivered_exactly_if_what_delivery_needs_is_right(data: st.DataObject) -> None:
    schema = Schema.of(WorkItem)
    doc = data.draw(valid(schema))
    doc['message'].update({'headers': {}, 'content-type': None, 'content-encoding': None})
    assert malformed_reason(doc) is None
    member, wrong = data.draw(spoilt(schema, doc))
    assume(nesting(wrong)[0] <= MAX_LEVELS)
    is_needed = member in ('message', 'attempts', 'claimed', 'date')
    assert (malformed_reason(wrong) or '').startswith(f'malformed: {member}' if is_needed else '')
    assert (malformed_reason(wrong) is not None) == is_needed


class _Part(TypedDict):
    name: str


class _Whole(TypedDict):
    parts: list[_Part]
    by_name: dict[str, _Part]
    part: _Part | None
    kind: Literal['a', 'b']


def test_clean_leaves_out_only_what_is_wrong() -> None:
    doc = {
        'parts': [{'name': 'a'}, {'name': 5}, 'b'],
        'by_name': {'a': {'name': 'a', 'more': 1}, 'b': None},
        'part': {'name': None, 'more': 2},
        'kind': 'c',
        'unknown': 5,
    }
    assert Schema.of(_Whole).clean(doc) == {
        'parts': [{'name': 'a'}],
        'by_name': {'a': {'name': 'a', 'more': 1}},
        'part': {'more': 2},
        'unknown': 5,
    }
    assert Schema.of(_Whole).problem('', doc) == 'parts must be a list'
