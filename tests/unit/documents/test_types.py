"""The types of documents have the members that docs/reference/documents.rst lists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from celery_couchdb.beat import entries
from celery_couchdb.results import documents as results
from kombu_couchdb.documents import shared_documents, types
from kombu_couchdb.parcels import parcel
from kombu_couchdb.regions import region

PAGE = (Path(__file__).parents[3] / 'docs/reference/documents.rst').read_text('utf-8')
SECTIONS = dict(re.findall(r'^(\w+)\n-+\n(.*?)(?=^\w[\w ]*\n[-=]+\n)', PAGE, re.MULTILINE | re.DOTALL))
TYPES: dict[str, Any] = {
    'WorkItem': types.WorkItem,
    'DoneItem': types.DoneItem,
    'LentItem': region.LentItem,
    'Consumer': shared_documents.Consumer,
    'Queue': shared_documents.Queue,
    'Binding': shared_documents.Binding,
    'Exchange': shared_documents.FanoutExchange,
    'Broadcast': shared_documents.Broadcast,
    'Leader': shared_documents.Leader,
    'Pause': shared_documents.Pause,
    'Notice': shared_documents.Notice,
    'Bell': shared_documents.Bell,
    'Rate': shared_documents.Rate,
    'Slot': shared_documents.Slot,
    'Schedule': entries.Schedule,
    'ScheduleState': entries.ScheduleState,
    'Parcel': parcel.Parcel,
    'Region': region.Region,
    'Receipt': parcel.Receipt,
    'Result': results.Result,
    'Group': results.Group,
    'Value': results.Value,
    'Chord': results.Chord,
    'Part': results.ChordPart,
}


def own(names: Any) -> set[str]:
    """Return the names without CouchDB's own members."""
    return {name for name in names if not name.startswith('_')}


def test_every_type_of_document_has_a_type() -> None:
    assert set(TYPES) == set(SECTIONS)


@pytest.mark.parametrize('kind', TYPES)
def test_members(kind: str) -> None:
    listed = dict(re.findall(r'^``([\w.-]+)``\s+(always|some)\s', SECTIONS[kind], re.MULTILINE))
    tops = own(name.partition('.')[0] for name in listed)
    always = own(name.partition('.')[0] for name, there in listed.items() if there == 'always')
    assert own(TYPES[kind].__annotations__) == tops
    # `stamp` sets `date` when a document of results is stored.
    stamped = {'date'} if TYPES[kind].__module__ == results.__name__ else set[str]()
    assert own(TYPES[kind].__required_keys__) | stamped == always
