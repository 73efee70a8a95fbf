"""Reading a database page by page, in the order of ids, while others delete documents."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kombu_couchdb.contrib.parcels import parcel
from kombu_couchdb.couchdb.client import Client

#: In the order of their bytes, which is not that of a dictionary.
IDS = ['-', 'B', 'Z', 'a b', 'a-b', 'a1', 'aB', 'b', '~', 'ä']

#: A function that returns the ids of the next three documents after an id.
Read = Callable[[Client, str], list[str]]


def by_range(client: Client, after: str) -> list[str]:
    return [row['id'] for row in client.id_range('', limit=3, after=after)]


def by_selector(client: Client, after: str) -> list[str]:
    return [doc['_id'] for doc in client.select({'wanted': True}, limit=3, after=after, fields=[])]


@pytest.mark.parametrize('read', [by_range, by_selector])
def test_no_document_is_left_out_if_the_last_one_of_a_page_is_deleted(client: Client, read: Read) -> None:
    client.bulk([{'_id': name, 'wanted': True} for name in IDS])
    found: list[str] = []
    while page := read(client, found[-1] if found else ''):
        found += page
        client.bulk([{**client.get(page[-1]), '_deleted': True}])
    assert found == IDS


def test_selected_documents(client: Client) -> None:
    client.bulk([{**doc, 'kind': 'x'} for doc in parcel.design_documents()])
    client.bulk([{'_id': 'a', 'kind': 'x', 'text': 'A'}, {'_id': 'b', 'kind': None}, {'_id': 'c'}])
    [doc] = client.select({'kind': 'x'}, limit=9)
    assert doc == client.get('a')
    assert client.select({'kind': {'$exists': True}}, limit=9, fields=['text']) == [
        {'_id': 'a', 'text': 'A'},
        {'_id': 'b'},
    ]
