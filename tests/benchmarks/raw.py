"""The raw limit: write WorkItems, read them from a view and delete them with the simplest loop, without claims."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import requests

from kombu_couchdb.documents import workitem
from kombu_couchdb.documents.types import WorkItem

from .systems.couchdb import RAW_DESIGN

__all__ = ['Sender', 'Taker']

#: Documents written in one request, the same number as in `Producer.batch()`, and documents read in one request.
_BATCH = 1000
_AHEAD = 1000


class Database:
    """One database over one persistent connection."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.session = requests.Session()
        self.session.trust_env = False  # otherwise requests reads the environment for every request
        self.session.auth = (parts.username, parts.password) if parts.username and parts.password else None
        self.url = parts._replace(netloc=parts.netloc.rpartition('@')[2]).geturl()

    def request(self, method: str, path: str, **kwargs: Any) -> Any:
        """Send a request and return the JSON of the response; *raises* `requests.RequestException`."""
        answer = self.session.request(method, self.url + path, timeout=60, **kwargs)
        answer.raise_for_status()
        return answer.json()


class Sender:
    """Writes the same documents as the transport."""

    batches = True

    def __init__(self, url: str, queue: str) -> None:
        self.database, self.queue = Database(url), queue

    def send(self, body: Any) -> None:
        """Write one document."""
        doc = self._document(body)
        self.database.request('PUT', '/' + doc['_id'], json=doc)

    def send_all(self, bodies: Iterable[Any]) -> None:
        """Write many documents, 1,000 in a request."""
        rest = iter(bodies)
        while docs := [self._document(body) for body in itertools.islice(rest, _BATCH)]:
            self.database.request('POST', '/_bulk_docs', json={'docs': docs})

    def settle(self) -> None:
        """Read the view, which updates its index."""
        self.database.request('GET', f'/_design/{RAW_DESIGN}/_view/waiting')

    def close(self) -> None:
        """Close the connection."""
        self.database.session.close()

    def _document(self, body: Any) -> WorkItem:
        now = time.time()
        doc_id = workitem.new_id(now)
        return workitem.new(
            doc_id,
            self.queue,
            {
                'body': json.dumps(body),
                'content-encoding': 'utf-8',
                'content-type': 'application/json',
                'headers': {},
                'properties': {
                    'delivery_mode': 2,
                    'delivery_info': {'exchange': '', 'routing_key': self.queue},
                    'priority': 0,
                    'body_encoding': None,
                    'delivery_tag': str(uuid4()),
                },
            },
            now,
        )


class Taker:
    """Reads ahead, delivers as many documents as the prefetch count says, and deletes them in one request."""

    def __init__(self, url: str, queue: str, prefetch: int, on_body: Callable[[Any], None]) -> None:
        self.database, self.prefetch, self._on_body = Database(url), prefetch, on_body
        self.range = {
            'startkey': json.dumps([queue]),
            'endkey': json.dumps([queue, {}]),
            'reduce': 'false',
            'include_docs': 'true',
            'limit': str(_AHEAD),
        }
        self.read: list[dict[str, Any]] = []

    def start(self) -> None:
        """Do nothing: there is nothing to prepare."""

    def take(self, seconds: float) -> None:
        """Deliver the next documents and delete them."""
        if not self.read:
            self.read = self.database.request('GET', f'/_design/{RAW_DESIGN}/_view/waiting', params=self.range)['rows']
        rows, self.read = self.read[: self.prefetch], self.read[self.prefetch :]
        for row in rows:
            self._on_body(json.loads(row['doc']['message']['body']))
        gone = [{'_id': row['id'], '_rev': row['doc']['_rev'], '_deleted': True} for row in rows]
        if len(gone) == 1:
            self.database.request('DELETE', f'/{gone[0]["_id"]}', params={'rev': gone[0]['_rev']})
        elif gone:
            self.database.request('POST', '/_bulk_docs', json={'docs': gone})

    def close(self) -> None:
        """Close the connection."""
        self.database.session.close()
