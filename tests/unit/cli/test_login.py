"""How the password or token of an administrator is sent, for apps with each kind of authentication."""

from __future__ import annotations

import pytest

from celery_couchdb.cli.clients import Login
from kombu_couchdb.couchdb.address import Address


@pytest.mark.parametrize(
    ('auth', 'with_password', 'with_token'),
    [
        ('basic', 'basic', 'jwt'),
        ('cookie', 'cookie', 'jwt'),
        ('jwt', 'basic', 'jwt'),
        ('iam', 'basic', 'iam'),
        ('proxy', 'basic', 'proxy'),
    ],
)
def test_kind_of_a_login(auth: str, with_password: str, with_token: str) -> None:
    other = Address(host='other', credentials='file:/run/secret', auth=auth)
    address = Address(credentials='file:/run/secret', auth=auth, others=(other,), token_url='http://tokens')
    for is_token, expected in ((False, with_password), (True, with_token)):
        login = Login('ann', 'tell-nobody', is_token)
        found = login.at(address)
        for node in (found, *found.others):
            assert (node.user, node.password, node.credentials, node.auth) == ('ann', 'tell-nobody', None, expected)
        assert (found.others[0].host, found.token_url) == ('other', 'http://tokens')
        assert 'tell-nobody' not in repr(login) + repr(found)
