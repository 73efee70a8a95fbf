"""The pace of requests to a CouchDB with limits."""

from __future__ import annotations

import pytest

from kombu_couchdb.couchdb.pacing import Kind, units_of


@pytest.mark.parametrize(
    ('method', 'path', 'size', 'kind', 'units'),
    [
        ('GET', '/a%2Fb', 1, Kind.READ, 1),
        ('GET', '/doc?rev=1-a', 1, Kind.READ, 1),
        ('HEAD', '/doc', 1, Kind.READ, 1),
        ('GET', '/doc/body', 1, Kind.READ, 1),
        ('GET', '/_local/checkpoint', 1, Kind.READ, 1),
        ('GET', '/_design/queues', 1, Kind.READ, 1),
        ('PUT', '/_design/queues', 1, Kind.WRITE, 1),
        ('PUT', '/doc', 1, Kind.WRITE, 1),
        ('DELETE', '/doc', 1, Kind.WRITE, 1),
        ('POST', '/_bulk_docs', 40, Kind.WRITE, 40),
        ('POST', '/_bulk_get', 1, Kind.QUERY, 1),
        ('POST', '/_all_docs?include_docs=true', 1, Kind.QUERY, 1),
        ('GET', '/_design_docs', 1, Kind.QUERY, 1),
        ('GET', '/_design/queues/_view/ready', 1, Kind.QUERY, 1),
        ('POST', '/_design/queues/_view/ready/queries', 3, Kind.QUERY, 3),
        ('POST', '/_find', 1, Kind.QUERY, 1),
        ('POST', '/_changes?feed=longpoll', 1, Kind.FEED, 1),
        ('GET', '/_design/queues/_info', 1, Kind.OTHER, 1),
        ('GET', '/_security', 1, Kind.OTHER, 1),
        ('PUT', '', 1, Kind.OTHER, 1),
        ('HEAD', None, 1, Kind.OTHER, 1),
    ],
)
def test_units_of_a_request(method: str, path: str | None, size: int, kind: Kind, units: int) -> None:
    assert units_of(method, path, size) == (kind, units)
