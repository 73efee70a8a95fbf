"""The fake of a managed service, see `examples.managed.service`: what it counts, and what it allows in a second."""

from __future__ import annotations

from email.message import Message

import pytest

from examples.managed.proxy import Request
from examples.managed.service import PLANS, Allowance, Counts
from kombu_couchdb.couchdb.pacing import RequestKind, units_of

#: What Cloudant's documentation says of each request: its kind, and how many units it costs.
RULES = [
    ('GET', '/db/doc', b'', RequestKind.READ, 1),
    ('HEAD', '/db/doc', b'', RequestKind.READ, 1),
    ('GET', '/db/doc/attachment', b'', RequestKind.READ, 1),
    ('GET', '/db/_local/doc', b'', RequestKind.READ, 1),
    ('GET', '/db/_design/ddoc', b'', RequestKind.READ, 1),
    ('PUT', '/db/doc', b'{}', RequestKind.WRITE, 1),
    ('DELETE', '/db/doc', b'', RequestKind.WRITE, 1),
    ('PUT', '/db/_local/doc', b'{}', RequestKind.WRITE, 1),
    ('PUT', '/db/_design/ddoc', b'{}', RequestKind.WRITE, 1),
    ('POST', '/db/_bulk_docs', b'{"docs": [{}, {}, {}]}', RequestKind.WRITE, 3),
    ('POST', '/db/_bulk_get', b'{"docs": [{}, {}, {}]}', RequestKind.QUERY, 1),
    ('GET', '/db/_all_docs', b'', RequestKind.QUERY, 1),
    ('POST', '/db/_all_docs', b'{"keys": ["a", "b"]}', RequestKind.QUERY, 1),
    ('POST', '/db/_find', b'{}', RequestKind.QUERY, 1),
    ('GET', '/db/_design/ddoc/_view/view', b'', RequestKind.QUERY, 1),
    ('POST', '/db/_design/ddoc/_view/view/queries', b'{"queries": [{}, {}]}', RequestKind.QUERY, 2),
    ('POST', '/db/_changes', b'{}', RequestKind.FEED, 1),
    ('GET', '/', b'', RequestKind.OTHER, 1),
    ('GET', '/_up', b'', RequestKind.OTHER, 1),
    ('PUT', '/db', b'', RequestKind.OTHER, 1),
]


def request(method: str, path: str, body: bytes = b'', port: int = 1) -> Request:
    return Request(method, path, '', body, Message(), port)


@pytest.mark.parametrize(('method', 'path', 'body', 'kind', 'units'), RULES)
def test_units_of_a_request(method: str, path: str, body: bytes, kind: RequestKind, units: int) -> None:
    sent = request(method, path, body)
    assert units_of(sent.method, sent.below, sent.size) == (kind, units)


@pytest.mark.parametrize(
    ('path', 'database', 'place'),
    [
        ('/', '', 'server'),
        ('/_up', '', '_up'),
        ('/a%2Fb', 'a%2Fb', 'database'),
        ('/_users/org.couchdb.user%3Ax', '_users', 'document'),
        ('/db/doc', 'db', 'document'),
        ('/db/doc/file', 'db', 'attachment'),
        ('/db/_local/x', 'db', '_local'),
        ('/db/_design/x', 'db', '_design'),
        ('/db/_design/x/_view/ready/queries', 'db', '_view/ready/queries'),
        ('/db/_bulk_docs', 'db', '_bulk_docs'),
    ],
)
def test_place_of_a_request(path: str, database: str, place: str) -> None:
    sent = request('GET', path)
    assert (sent.database, sent.place) == (database, place)


def test_plans_are_those_of_cloudant() -> None:
    assert [tuple(PLANS[plan].values()) for plan in ('lite', 'standard')] == [(20, 10, 5), (100, 50, 5)]


def test_units_are_free_again_after_a_second() -> None:
    allowance = Allowance(2)
    assert [allowance.take(1, now) for now in (0.0, 0.5, 0.9, 0.999)] == [True, True, False, False]
    assert [allowance.take(1, now) for now in (1.0, 1.4, 1.5)] == [True, False, True]


def test_a_large_request_is_paid_off_in_the_next_seconds() -> None:
    allowance = Allowance(10)
    assert allowance.take(3, 0.0)
    assert allowance.take(22, 0.0)  # 7 now, 10 one second later, and 5 of the next
    assert not any(allowance.take(1, now) for now in (0.9, 1.0, 1.9))
    assert allowance.take(5, 2.0)
    assert not allowance.take(1, 2.5)
    assert allowance.take(1, 3.0)


def test_no_more_than_the_limit_is_served_on_average() -> None:
    allowance = Allowance(10)
    served = sum(25 for tick in range(1000) if allowance.take(25, tick / 10))
    assert 1000 <= served <= 1025  # in 100 seconds


def test_a_request_that_is_refused_twice_in_a_row_is_named() -> None:
    counts = Counts()
    write, other = request('PUT', '/db/a', b'{}'), request('PUT', '/db/a', b'{"b": 1}')
    counts.refuse(write, RequestKind.WRITE)
    counts.refuse(other, RequestKind.WRITE)
    counts.admit(write, RequestKind.WRITE, 1)
    counts.refuse(write, RequestKind.WRITE)
    assert not counts.refused_again
    counts.refuse(request('PUT', '/db/a', b'{}', port=2), RequestKind.WRITE)
    assert counts.refused_again == ['PUT /db/a']
    # Two clients may read the same document.
    counts.refuse(request('GET', '/db/a', port=1), RequestKind.READ)
    counts.refuse(request('GET', '/db/a', port=2), RequestKind.READ)
    assert len(counts.refused_again) == 1
    assert counts.refused == {RequestKind.WRITE: 4, RequestKind.READ: 2}
