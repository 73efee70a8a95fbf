"""A simulated CouchDB without network, whose responses tests can replace."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import requests
from urllib3 import HTTPResponse

from kombu_couchdb.couchdb.call import Call
from kombu_couchdb.couchdb.http import Connections

from .documents import BROKER, NOW, RESULTS

__all__ = ['Fake', 'honest']

DOCS = {doc['_id']: {**doc, '_rev': '1-a'} for doc in [*BROKER.values(), *RESULTS.values()]}

#: The key of a row of each view, and the value of its reduction.
VIEWS: dict[str, tuple[Any, Any]] = {
    'waiting': (['q', 9, NOW], 1),
    'dead': (['q', NOW], 1),
    'expiring': (NOW, 1),
    'leases': (['claim', 'broker:consumer:gone', 'q'], {'sum': 1, 'count': 1, 'min': 1, 'max': 1, 'sumsqr': 1}),
    'by_task': ('task-1', 1),
    'history': (['', NOW], 1),
    'failures': (['group', 'add', 'rejected', NOW], {'sum': 1, 'count': 1, 'min': 1, 'max': 1, 'sumsqr': 1}),
    'due': (NOW, 1),
}


#: Responses to requests of administrators.
SERVER: dict[str, Any] = {
    '_membership': {'cluster_nodes': ['a', 'b'], 'all_nodes': ['a', 'b']},
    '_node/a/_system': {'uptime': 500, 'internal_replication_jobs': 0},
    '_node/b/_system': {'uptime': 500},
    '_active_tasks': [{'type': 'indexer', 'database': 'shards/0-f/other.1'}],
    '_session': {'userCtx': {'name': 'me', 'roles': ['_admin']}},
    '_security': {'members': {'names': ['me']}},
    '_revs_limit': 1000,
    '_node/_local/_config/admins': {'me': 'hash'},
    '_users/_all_docs': {'rows': [{'id': 'org.couchdb.user:somebody'}]},
}


#: After this number of requests, views and ranges of documents are empty, so that loops which delete everything end.
_ENOUGH = 15


def honest(method: str, path: str, query: dict[str, str], body: Any) -> Any:
    """Return a valid response of CouchDB. `path` is relative to the database; None is the root of the server."""
    name = unquote(path.lstrip('/'))
    if name in SERVER and method == 'GET':
        return SERVER[name]
    if name.endswith('/_info'):
        return {
            'view_index': {
                'update_seq': 7,
                'updater_running': False,
                'sizes': {'file': 5},
                'updates_pending': {'total': 0},
            }
        }
    if name == '_purge':
        return {'purge_seq': None, 'purged': {doc_id: [] for doc_id in body}}
    if name == '_bulk_docs':
        return [{'ok': True, 'id': doc.get('_id'), 'rev': '2-b'} for doc in body['docs']]
    if name == '_bulk_get':
        return {'results': [{'id': wanted['id'], 'docs': [_leaf(wanted['id'])]} for wanted in body['docs']]}
    if name == '_changes':
        changes = [
            {'seq': '7-x', 'id': doc_id, 'changes': [{'rev': '1-a'}], 'doc': doc} for doc_id, doc in DOCS.items()
        ]
        return {'results': changes, 'last_seq': '7-x', 'pending': 0}
    if name == '_all_docs':
        keys = body['keys'] if body else [key for key in sorted(DOCS) if key.startswith(json.loads(query['startkey']))]
        return {
            'total_rows': 5,
            'offset': 0,
            'rows': [
                {'id': key, 'key': key, 'value': {'rev': '1-a'}, 'doc': _stored(key)}
                for key in keys
                if 'skip' not in query
            ],
        }
    if name.endswith('/queries'):
        return {'results': [{'rows': _rows(name.split('/')[-2], _encoded(query))} for query in body['queries']]}
    if '/_view/' in name:
        return {'rows': _rows(name.rpartition('/')[2], {**query, **_encoded(body or {})})}
    if method == 'GET' and query.get('open_revs'):
        return [{'ok': _stored(name)}]
    if method == 'GET' and name:
        return _stored(name)
    if method == 'GET':
        return {
            'update_seq': '7-x',
            'doc_count': 5,
            'doc_del_count': 5,
            'sizes': {'file': 5, 'active': 5},
            'cluster': {'n': 1},
            'compact_running': False,
        }
    return {'ok': True, 'id': name, 'rev': '2-b'}


def _stored(doc_id: str) -> dict[str, Any]:
    return DOCS.get(doc_id, {'_id': doc_id, '_rev': '1-a', 'type': 'Unknown'})


def _leaf(doc_id: str) -> dict[str, Any]:
    return (
        {'ok': DOCS[doc_id]} if doc_id in DOCS else {'error': {'id': doc_id, 'error': 'not_found', 'reason': 'missing'}}
    )


def _encoded(query: dict[str, Any]) -> dict[str, str]:
    return {name: json.dumps(value) for name, value in query.items()}


def _rows(view: str, query: dict[str, str]) -> list[dict[str, Any]]:
    key, reduced = VIEWS[view]
    if 'startkey_docid' in query or query.get('skip', '0') != '0':
        return []
    if view == 'due':
        return [{'id': doc['_id'], 'key': NOW, 'value': [doc['type'], '1-a']} for doc in RESULTS.values()]
    if query.get('reduce') == 'false' or view in ('expiring', 'by_task', 'history'):
        value = {'waiting': [9, '1-a'], 'expiring': '1-a'}.get(view)
        return [{'id': doc['_id'], 'key': key, 'value': value, 'doc': _stored(doc['_id'])} for doc in BROKER.values()]
    level = int(query.get('group_level', 0))
    return [{'key': key[:level] if level else None, 'value': reduced}]


class _Body(io.BytesIO):
    """The stream that http.client reads; it is closed at its end."""

    def read(self, size: int | None = -1) -> bytes:
        text = super().read(size)
        if size is None or size < 0 or len(text) < size:
            self.close()
        return text


#: The host that is simulated.
HOST = 'fake'

_connected = Connections._connected


class Fake:
    """Replaces the connection pool of clients. `spoil(path, response)` returns the body that is sent.

    `spoil` may also return `(status, headers, body)`.
    """

    def __init__(self, spoil: Callable[[str, Any], Any]) -> None:
        self.spoil = spoil
        self.requests: list[str] = []

    def connected_to(self) -> Callable[[Connections], tuple[Any, dict[str, Any]]]:
        """Return a replacement for `Connections._connected`, which affects only clients of the simulated host."""

        def connected(connections: Connections) -> tuple[Any, dict[str, Any]]:
            if urlsplit(connections.url).hostname != HOST:
                return _connected(connections)
            self.url = connections.url
            return self, {}

        return connected

    def close(self) -> None:
        """Do nothing."""

    def send_call(self, call: Call, request: requests.PreparedRequest, **settings: Any) -> requests.Response:
        """Return the response to one request."""
        parts = urlsplit(str(request.url))
        path = parts.path.removeprefix(urlsplit(self.url).path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.requests.append(f'{request.method} {path}')
        if parts.path == '/':
            right: Any = {'couchdb': 'Welcome', 'version': '3.5.0', 'vendor': {'name': 'x'}}
        else:
            right = honest(str(request.method), path, query, json.loads(request.body) if request.body else None)
        if ('/_view/' in path or (path == '/_all_docs' and request.method == 'GET')) and len(self.requests) > _ENOUGH:
            right = {'rows': []} if 'rows' in right else {'results': [{'rows': []} for _ in right['results']]}
        assert len(self.requests) < 20 * _ENOUGH, f'an endless loop of requests: {self.requests[-3:]}'
        told = self.spoil(path, right)
        status, headers, body = told if isinstance(told, tuple) else (200, {}, told)
        response = requests.Response()
        response.status_code, response.reason = status, 'Reason'
        response.headers.update(headers)
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        response.raw = HTTPResponse(_Body(text), headers=headers, status=status, preload_content=False)
        return response
