"""The subscriber to results (`celery_couchdb.waiting.subscriber`), with a store in memory that fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from celery_couchdb.results.store import Store
from celery_couchdb.waiting.mailbox import Mailbox
from celery_couchdb.waiting.subscriber import Subscriber
from kombu_couchdb.errors import RequestRefused, ServerUnavailable


class FailingStore:
    """A store of which every read fails with `error`."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.client: Any = SimpleNamespace(address=SimpleNamespace(url='http://host/db'))

    def read(self, doc_id: str) -> None:
        raise self.error


def test_outage_during_the_search_for_a_bad_document_leaves_everything_to_be_read_again() -> None:
    subscriber = Subscriber(cast(Store, FailingStore(ServerUnavailable('no response'))))
    mailbox = Mailbox()
    subscriber._watched.mailboxes['a'] = {mailbox}
    subscriber._since = '5-x'
    subscriber._fail({'a'}, RequestRefused('odd'))
    assert subscriber._since is None
    assert subscriber._watched.mailboxes == {'a': {mailbox}}
