"""The keys of queues in views (`kombu_couchdb.design`)."""

from __future__ import annotations

import pytest

from kombu_couchdb import design


@pytest.mark.parametrize(
    ('name', 'key'),
    [
        ('celery', 'celery'),
        ("a-b_c.d!e~f*g'h(i)", "a-b_c.d!e~f*g'h(i)"),
        ('a/b c%', 'a%2Fb%20c%25'),
        ('é', '%C3%A9'),
        ('😀\0', '%F0%9F%98%80%00'),
    ],
)
def test_key_of_a_name_equals_that_of_javascript(name: str, key: str) -> None:
    assert design.key_of(name) == key
    assert design.queue_of(key) == name


@pytest.mark.parametrize('key', [None, 5, ['q'], {}])
def test_value_that_is_not_a_name_is_none(key: object) -> None:
    assert design.queue_of(key) is None
