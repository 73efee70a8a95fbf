"""Replications between regions: their documents, the node from which they pull, and whether they have reached it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kombu_couchdb.couchdb.address import Address, parse_list
from kombu_couchdb.errors import ConfigurationError
from kombu_couchdb.options import Options
from kombu_couchdb.parcels import replications
from kombu_couchdb.parcels.replications import endpoint
from kombu_couchdb.regions.region_status import addresses, pulled_parcels

SOURCE = {
    'url': 'https://us:6984/celery_regions',
    'auth': {'basic': {'username': 'celery', 'password': 'secret'}},
}
TARGET = {'url': 'http://127.0.0.1:5984/own'}


def credentials() -> tuple[str, str]:
    return 'rotated', 'new'


@pytest.mark.parametrize(
    ('doc_id', 'travels'),
    [
        ('p:eu:us:1', True),
        ('p:us:eu:1', True),
        ('region:us', True),
        ('p:eu:asia:1', False),
        ('p:eu-west:us:1', False),
        ('p:eu:us-east:1', False),
        ('xp:eu:us:1', False),
        ('region:us-east', False),
        ('_design/celery-regions-v1', False),
    ],
)
def test_only_documents_between_the_two_regions_are_pulled(doc_id: str, travels: bool) -> None:
    selector = pulled_parcels('eu', 'us', SOURCE, TARGET)['selector']
    assert bool(re.search(selector['_id']['$regex'], doc_id)) == travels


def regions_of(urls: dict[str, str], **more: Any) -> dict[str, Address]:
    return addresses(Options.of({'region': 'eu', 'regions': {'eu': 'couchdb://eu/celery_regions', **urls}, **more}))


def test_region_without_a_user_has_that_of_the_credentials() -> None:
    found = regions_of(
        {'us': 'couchdb://us/r', 'asia': 'couchdb://a:b@asia/r'}, credentials=f'{__name__}:{credentials.__name__}'
    )
    users = {name: endpoint(address)['auth']['basic']['username'] for name, address in found.items()}
    assert users == {'eu': 'rotated', 'us': 'rotated', 'asia': 'a'}


def test_cluster_has_several_addresses_and_tls_is_read_from_the_url() -> None:
    found = regions_of({'us': 'couchdbs://one/r?ssl_cert_reqs=none;couchdbs://two/r'})
    assert found['us'].server == 'https://one:6984'
    assert [other.server for other in found['us'].others] == ['https://two:6984']
    assert found['us'].verify is False


def test_wrong_url_names_the_region_but_no_password() -> None:
    with pytest.raises(ConfigurationError, match=r'region us: unknown parameter') as caught:
        regions_of({'us': 'couchdb://me:hidden@us/r?nope=1'})
    assert 'hidden' not in str(caught.value)


A, B, C = 'http://a:5984', 'http://b:5984', 'http://c:5984'
CLUSTER = parse_list([f'couchdb://{host}/r' for host in 'abc'], 'regions', 'celery')


@pytest.mark.parametrize(
    ('up', 'used', 'choice'),
    [
        ((A, B, C), None, A),
        ((A, B, C), C, C),
        ((A, B), C, A),
        ((A, B, C), 'http://gone:5984', A),
        ((), B, B),
        ((), None, A),
    ],
)
def test_node_in_use_is_chosen_if_it_responds_and_else_the_first_that_does(
    monkeypatch: pytest.MonkeyPatch, up: tuple[str, ...], used: str | None, choice: str
) -> None:
    monkeypatch.setattr(replications, 'responds', lambda node: node.server in up)
    found = replications.chosen(CLUSTER, used)
    assert (found.server, found.others) == (choice, ())


class Server:
    """A server with these replications and tasks."""

    def __init__(self, docs: list[dict[str, Any]], tasks: list[dict[str, Any]]) -> None:
        self._docs, self._tasks = docs, tasks

    def request(self, method: str, path: str, *_: Any, **__: Any) -> Any:
        if path.endswith('_all_docs'):
            return {'rows': [{'id': doc['_id'], 'doc': doc} for doc in self._docs]}
        return self._tasks


@pytest.mark.parametrize(
    ('doc', 'task', 'expected'),
    [
        ({}, {'doc_id': 'r', 'checkpoint_interval': 30000}, {'r'}),
        ({'checkpoint_interval': 30001}, {'doc_id': 'r', 'checkpoint_interval': 30001}, {'r'}),
        ({'checkpoint_interval': 30001}, {'doc_id': 'r', 'checkpoint_interval': 30000}, set()),
        ({}, {'type': 'indexer'}, set()),
    ],
)
def test_replication_has_reached_its_source_if_it_is_a_task_with_the_settings_of_its_document(
    doc: dict[str, Any], task: dict[str, Any], expected: set[str]
) -> None:
    server: Any = Server([{'_id': 'r', **doc}], [task])
    assert replications.reached(server, 'eu') == expected
