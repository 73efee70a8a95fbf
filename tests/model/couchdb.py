"""A model of CouchDB: revision trees on several nodes, quorums, views, and writes that have not reached all nodes.

The model of one node is exact: `test_couchdb.py` sends the same requests to a real server. The model of a cluster
follows measurements: each node decides by its own copy, a response is a quorum of equal replies, and a write without a
quorum is `accepted` (unproven). Nodes replicate from each other only when the test says so. The model raises the errors
that `Client` raises.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import md5
from typing import Any, NamedTuple
from urllib.parse import unquote

from kombu_couchdb import errors
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.shapes import Shape, anything

Document = dict[str, Any]


class Revision(NamedTuple):
    parent: str | None
    body: Document
    deleted: bool


#: All revisions of one document that a node knows, by revision.
Tree = dict[str, Revision]

#: A document's reply to a write at one node: its new revision, or None for a conflict.
Reply = str | None


def leaves(tree: Tree) -> list[str]:
    """Return the leaf revisions, the winning one first: not deleted, longest history, largest revision."""
    parents = {revision.parent for revision in tree.values()}
    return sorted(
        (rev for rev in tree if rev not in parents),
        key=lambda rev: (not tree[rev].deleted, generation(rev), rev),
        reverse=True,
    )


def generation(rev: str) -> int:
    return int(rev.partition('-')[0])


def document(doc_id: str, tree: Tree, rev: str) -> Document:
    found = tree[rev]
    return {'_id': doc_id, '_rev': rev, **({'_deleted': True} if found.deleted else {}), **found.body}


def seen(doc_id: str, tree: Tree) -> Document | None:
    """Return the winning revision as a document, or None if it is deleted or there is none."""
    first = next(iter(leaves(tree)), None)
    return None if first is None or tree[first].deleted else document(doc_id, tree, first)


class Node:
    """One copy of the database, and its view index as of the last update."""

    def __init__(self, salt: int) -> None:
        self._salt = salt
        self.trees: dict[str, Tree] = {}
        self.indexed: dict[str, Document] = {}

    def write(self, doc: Document) -> Reply:
        """Store a new revision of a document if its parent is a leaf on this node; return None for a conflict."""
        tree, parent = self.trees.get(doc['_id'], {}), doc.get('_rev')
        found = leaves(tree)
        if parent is not None and (parent not in found or tree[parent].deleted):
            return None
        if parent is None and found and tree[found[0]].deleted:
            parent = found[0]
        elif parent is None and found:
            return None
        body = {name: value for name, value in doc.items() if name not in ('_id', '_rev', '_deleted')}
        deleted = bool(doc.get('_deleted'))
        digest = md5(json.dumps([self._salt, deleted, parent, body], sort_keys=True).encode()).hexdigest()
        rev = f'{generation(parent) + 1 if parent else 1}-{digest}'
        self.trees[doc['_id']] = {**tree, rev: Revision(parent, body, deleted)}
        return rev

    def create(self, doc: Document) -> Reply:
        """Store a revision as it is, as replication does, unless this node knows it (`new_edits: false`)."""
        rev, tree = doc['_rev'], self.trees.get(doc['_id'], {})
        if rev not in tree:
            history = doc.get('_revisions', {}).get('ids', [''])
            parent = f'{generation(rev) - 1}-{history[1]}' if history[1:] else None
            body = {name: value for name, value in doc.items() if name not in ('_id', '_rev', '_deleted', '_revisions')}
            self.trees[doc['_id']] = {**tree, rev: Revision(parent, body, bool(doc.get('_deleted')))}
        return rev

    def learn(self, other: Node) -> None:
        """Replicate all revisions from another node."""
        for doc_id, tree in other.trees.items():
            self.trees[doc_id] = {**tree, **self.trees.get(doc_id, {})}

    def index(self, fresh: bool) -> dict[str, Document]:
        if fresh:
            self.indexed = {doc_id: doc for doc_id, tree in self.trees.items() if (doc := seen(doc_id, tree))}
        return self.indexed


class Write:
    """A `_bulk_docs` request in progress, which reaches the nodes one by one."""

    def __init__(self, docs: Sequence[Document], nodes: int, *, new_edits: bool = True) -> None:
        self.docs, self._nodes, self.new_edits = docs, nodes, new_edits
        self.pending = set(range(nodes))
        self._replies: list[list[Reply]] = []

    def replied(self, node: int, replies: list[Reply] | None) -> None:
        """Record the replies of a node; None if it was down."""
        self.pending.discard(node)
        if replies is not None:
            self._replies.append(replies)

    @property
    def response(self) -> list[Document] | None:
        """The response of CouchDB, or None while CouchDB waits for more nodes."""
        answers = self.answers
        return answers if self.new_edits or answers is None else [each for each in answers if 'error' in each]

    @property
    def answers(self) -> list[Document] | None:
        """What CouchDB knows of each document, or None while it waits for more nodes."""
        answers = [
            self._answer(doc, Counter(replies[index] for replies in self._replies))
            for index, doc in enumerate(self.docs)
        ]
        return [answer for answer in answers if answer] if all(answers) else None

    def _answer(self, doc: Document, replies: Counter[Reply]) -> Document | None:
        stored = {rev: count for rev, count in replies.items() if rev}
        proven = next((rev for rev, count in stored.items() if count > self._nodes // 2), None)
        if proven:
            return {'ok': True, 'id': doc['_id'], 'rev': proven}
        if self.pending:
            return None
        if stored:
            return {'ok': True, 'id': doc['_id'], 'rev': next(iter(stored)), 'accepted': True}
        if replies:
            return {'id': doc['_id'], 'error': 'conflict', 'reason': 'Document update conflict.'}
        return {'id': doc['_id'], 'error': 'internal_server_error', 'reason': 'no node'}


class CouchDB:
    """A database on several nodes. Reads return at once, from the given node or a quorum that starts there."""

    def __init__(self, nodes: int, salt: int = 0) -> None:
        # The salt changes the revisions, and with them which of two conflicting leaves wins.
        self.nodes = [Node(salt) for _ in range(nodes)]
        #: Writes that have not reached all nodes.
        self.under_way: list[Write] = []

    def begin(self, docs: Sequence[Document], *, new_edits: bool = True) -> Write:
        """Receive a write, which has reached no node yet."""
        write = Write(json.loads(json.dumps(docs)), len(self.nodes), new_edits=new_edits)
        self.under_way.append(write)
        return write

    def land(self, write: Write, node: int, *, lost: bool = False) -> None:
        """Let a write reach a node; if `lost`, it never reaches this node."""
        if node in write.pending:
            store = self.nodes[node].write if write.new_edits else self.nodes[node].create
            write.replied(node, None if lost else [store(doc) for doc in write.docs])
        if not write.pending and write in self.under_way:
            self.under_way.remove(write)

    def store(self, docs: Sequence[Document], *, new_edits: bool = True) -> list[Document]:
        """Write to all nodes, one after another, and return the response."""
        write = self.begin(docs, new_edits=new_edits)
        for node in range(len(self.nodes)):
            self.land(write, node)
        return write.response or []

    def synchronise(self) -> None:
        """Replicate between all nodes."""
        for node in self.nodes:
            for other in self.nodes:
                node.learn(other)

    def tree(self, doc_id: str, nodes: Sequence[int] | None = None) -> Tree:
        """Return the union of the revisions of a document on the given nodes, by default on all."""
        tree: Tree = {}
        for node in self.nodes if nodes is None else [self.nodes[number] for number in nodes]:
            tree = {**node.trees.get(doc_id, {}), **tree}
        return tree

    def ids(self) -> list[str]:
        """Return the ids of all documents, including deleted ones."""
        return sorted({doc_id for node in self.nodes for doc_id in node.trees})

    # -- reads

    def read(self, path: str, params: dict[str, Any], body: Any, at: int) -> Any:
        """Respond to a read.

        Views are read from node `at`; single documents are read from a quorum that starts there.
        """
        quorum = [(at + more) % len(self.nodes) for more in range(len(self.nodes) // 2 + 1)]
        if path == '/':
            return {'cluster': {'n': len(self.nodes)}}
        if path == '/_bulk_get':
            return {'results': [{'id': one['id'], 'docs': self._leaves(one['id'], quorum)} for one in body['docs']]}
        if path == '/_all_docs' and body:
            return {'rows': [self._row(doc_id, quorum, params) for doc_id in body['keys']]}
        if path == '/_all_docs':
            ids = [doc_id for doc_id in sorted(self.nodes[at].trees) if _within(doc_id, params)]
            rows = [self._row(doc_id, [at], params) for doc_id in ids if seen(doc_id, self.nodes[at].trees[doc_id])]
            return {'rows': rows[params.get('skip', 0) :][: params.get('limit')]}
        if path.endswith('/conflicted'):
            return {'rows': list(_conflicted(self.nodes[at].trees, json.loads(params['keys'])))}
        if path.endswith('/by_task'):
            return {'rows': list(_by_task(self.nodes[at].trees, json.loads(params['keys'])))}
        if '/_view/' in path:
            view, *many = path.partition('/_view/')[2].split('/')
            docs = self.nodes[at].index(params.get('update', 'true') == 'true')
            asked = body['queries'] if many else [body or {}]
            found = [{'rows': _view(docs, view, {**params, **_encoded(query)})} for query in asked]
            return {'results': found} if many else found[0]
        return self._get(unquote(path[1:]), quorum, params)

    def _get(self, doc_id: str, quorum: list[int], params: dict[str, Any]) -> Any:
        if doc_id.startswith('_design/'):
            return {'_id': doc_id, '_rev': '1-a'}
        if 'open_revs' in params:
            found = self._leaves(doc_id, quorum)
            if 'error' in found[0]:
                raise errors.NotFound(doc_id)
            return found
        doc = seen(doc_id, self.tree(doc_id, quorum))
        if doc is None:
            raise errors.NotFound(doc_id)
        return doc

    def _leaves(self, doc_id: str, quorum: list[int]) -> list[Document]:
        tree = self.tree(doc_id, quorum)
        return [{'ok': document(doc_id, tree, rev)} for rev in leaves(tree)] or [{'error': {'error': 'not_found'}}]

    def _row(self, doc_id: str, nodes: list[int], params: dict[str, Any]) -> Document:
        tree = self.tree(doc_id, nodes)
        if not tree:
            return {'key': doc_id, 'error': 'not_found'}
        doc = seen(doc_id, tree)
        row = {'id': doc_id, 'key': doc_id, 'value': {'rev': leaves(tree)[0], **({} if doc else {'deleted': True})}}
        return {**row, 'doc': doc} if params.get('include_docs') else row


# -- views: they emit the same rows as `kombu_couchdb/design/*.js`


def _claimed(doc: Document) -> bool:
    return isinstance((doc.get('claimed') or {}).get('by'), str)


def _waiting(doc: Document) -> Iterator[tuple[Any, Any]]:
    if doc.get('type') == 'WorkItem' and not doc.get('status') and not _claimed(doc):
        rank = 9 - doc['priority']
        order = [rank, doc['published']] if doc['date'] is None else [10, doc['date']]
        order = [11, order[1]] if doc.get('parked') else order
        yield [doc['queue'], *order], [rank, doc['_rev']]


def _leases(doc: Document) -> Iterator[tuple[Any, Any]]:
    if doc.get('type') == 'WorkItem' and not doc.get('status') and _claimed(doc):
        yield ['claim', doc['claimed']['by'], doc['queue']], doc['claimed']['date']
    elif doc.get('type') == 'WorkItem' and not doc.get('status') and doc.get('parked'):
        yield ['parked', None, doc['parked']['key'], 9 - doc['priority'], doc['published']], doc['published']
    elif doc.get('type') == 'Slot':
        yield ['slot', doc['by']], doc['date']
    elif doc.get('type') == 'Consumer':
        yield ['consumer', doc['_id']], doc['expires']


def _conflicted(trees: dict[str, Tree], kinds: list[str]) -> Iterator[Document]:
    """Yield the rows of the view of conflicts, for these types of documents."""
    for doc_id, tree in trees.items():
        doc = seen(doc_id, tree)
        if doc and doc['type'] in kinds:
            counted = [rev for rev in leaves(tree) if doc['type'] == 'WorkItem' or not tree[rev].deleted]
            if len(counted) > 1:
                yield {'id': doc_id, 'key': doc['type'], 'value': counted}


def _by_task(trees: dict[str, Tree], tasks: list[str]) -> Iterator[Document]:
    """Yield the rows of the view of jobs, for these tasks, with their documents."""
    for doc_id, tree in trees.items():
        doc = seen(doc_id, tree)
        if doc and doc['type'] in ('WorkItem', 'DoneItem') and (task := doc['message']['headers'].get('id')) in tasks:
            yield {'id': doc_id, 'key': task, 'value': None, 'doc': doc}


VIEWS: dict[str, Callable[[Document], Iterator[tuple[Any, Any]]]] = {'waiting': _waiting, 'leases': _leases}


def _encoded(query: Document) -> dict[str, Any]:
    """Return a query from the body of a request as the parameters of a URL."""
    return {name: json.dumps(value) if name in ('startkey', 'endkey') else value for name, value in query.items()}


def _view(docs: dict[str, Document], name: str, params: dict[str, Any]) -> list[Document]:
    emitted = [
        {'id': doc['_id'], 'key': key, 'value': value, 'doc': doc}
        for doc in docs.values()
        for key, value in VIEWS[name](doc)
        if _within(key, params, doc['_id'])
    ]
    rows = sorted(emitted, key=lambda row: (_collation(row['key']), row['id']))
    if params.get('reduce') is not False:
        return _reduced(rows, name, params.get('group_level', 0))
    rows = rows[params.get('skip', 0) :][: params.get('limit')]
    return rows if params.get('include_docs') else [{n: row[n] for n in ('id', 'key', 'value')} for row in rows]


def _reduced(rows: list[Document], name: str, level: int) -> list[Document]:
    groups: dict[str, list[Any]] = {}
    for row in rows:
        groups.setdefault(json.dumps(row['key'][:level] if level else None), []).append(row['value'])
    return [
        {'key': json.loads(key), 'value': _stats(values) if name == 'leases' else len(values)}
        for key, values in groups.items()
    ]


def _stats(values: list[float]) -> Document:
    return {
        'sum': sum(values),
        'count': len(values),
        'min': min(values),
        'max': max(values),
        'sumsqr': sum(value * value for value in values),
    }


def _within(key: Any, params: dict[str, Any], doc_id: str = '') -> bool:
    start, end = (json.loads(params[name]) if name in params else None for name in ('startkey', 'endkey'))
    after = (
        (_collation(key), doc_id) >= (_collation(start), params.get('startkey_docid', ''))
        if start is not None
        else True
    )
    return after and (end is None or _collation(key) <= _collation(end))


def _collation(key: Any) -> Any:
    """Return a sort key for view keys, in CouchDB's order: null, numbers, text, arrays, objects."""
    if isinstance(key, list):
        return (4, [_collation(part) for part in key])
    if isinstance(key, (int, float)):
        return (2, key)
    return (3, key) if isinstance(key, str) else (5, '') if key is not None else (1, '')


class ModelClient(Client):
    """A client whose server is a model."""

    clock: Any = None
    database: CouchDB

    def request(
        self,
        method: str,
        path: str,
        params: Any = None,
        body: Any = None,
        *,
        repeat: bool = False,
        is_of_server: bool = False,
        size: int = 1,
        timeout: float | None = None,
        shape: Shape = anything,
    ) -> Any:
        body = json.loads(body) if isinstance(body, bytes) else body
        answer = self.answer(method, path or '/', dict(params or {}), body)
        assert shape(answer), f'the response of the model to {path} has a shape that CouchDB never sends: {answer}'
        return answer

    def answer(self, method: str, path: str, params: dict[str, Any], body: Any) -> Any:
        """Return the response to a request; raise the error that `Client` raises."""
        if path == '/_bulk_docs':
            return self.database.store(body['docs'], new_edits=body.get('new_edits', True))
        if method == 'PUT':
            [answer] = self.database.store([body])
            if 'error' in answer:
                raise errors.Conflict(answer['id'])
            return answer
        return json.loads(json.dumps(self.database.read(path, params, body, 0)))
