"""Names of devices: each is part of a database's name, of ids and of a regular expression."""

from __future__ import annotations

import pytest

from kombu_couchdb.contrib.parcels.devices import database_of
from kombu_couchdb.errors import ConfigurationError


@pytest.mark.parametrize('name', ['a', 'alice-2', 'a_b', 'a' * 60])
def test_name_of_a_device(name: str) -> None:
    assert database_of('parcels', name) == f'parcels-{name}'


@pytest.mark.parametrize('name', ['', 'a' * 61, '2a', '-a', 'Alice', 'alice.*', 'alice|bob', 'alice:', 'a b', 'a\n'])
def test_wrong_name_of_a_device(name: str) -> None:
    with pytest.raises(ConfigurationError, match='the user of a device must be named with a lower-case letter'):
        database_of('parcels', name)
