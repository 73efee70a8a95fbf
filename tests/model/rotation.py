"""The real consumers and the real rotation of their database, which is killed at any request, on a model of the server.

Here the model replaces `Http._send` only, so that the code by which requests follow a moved database runs as it is. The
server has one node.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest import mock
from urllib.parse import parse_qsl, unquote

from greenlet import greenlet
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kombu_couchdb import errors
from kombu_couchdb.admin.cluster import Cluster, Indexes, Refused
from kombu_couchdb.admin.rotation import rotate
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.http import Http
from kombu_couchdb.couchdb.location import DOCUMENT, MAX_PAUSE_SECONDS, Location, location_name

from .couchdb import REFUSED, CouchDB, Document, Revision, Write, document, generation, leaves
from .machine import NODE, PROCESS, WRONG, Single
from .world import Actor, Request, Sleep, World, _ModelClient, wait

#: The name of the database in settings.
GIVEN = 'celery'

#: The name in `Request.params` of what the model of one database does not need.
ADDRESSED = 'addressed'

COMMAND = st.integers(0, 1)

#: Responses about a database that are always the same.
_SETTINGS = {'/_security': {}, '/_revs_limit': 20}


class Database(CouchDB):
    """A database that can be closed, with design documents and changes."""

    def __init__(self, world: MovingWorld, salt: int) -> None:
        super().__init__(1, salt)
        self._world = world
        self.designs: dict[str, Document] = {}
        #: By document id, the number of its last change.
        self.changed: dict[str, int] = {}

    @property
    def is_closed(self) -> bool:
        """Whether writes are refused now."""
        closing = self.designs.get('_design/celery-closed')
        return closing is not None and self._world.now + self._world.wrong < closing.get('until', float('inf'))

    @property
    def exists(self) -> bool:
        """Whether the database was not deleted."""
        return self in self._world.databases.values()

    def land(self, write: Write, node: int, *, lost: bool = False) -> None:
        if not self.exists or self.is_closed:
            write.error = None if self.exists else errors.DatabaseMissing(GIVEN)
            write.replied(0, [REFUSED for _ in write.docs])
            self.under_way.remove(write)
            return
        super().land(write, node, lost=lost)
        self.note(doc['_id'] for doc in write.docs)

    def note(self, ids: Any) -> None:
        """Note that documents may have changed."""
        for doc_id in ids:
            self.changed[doc_id] = max(self.changed.values(), default=0) + 1

    def request(self, method: str, path: str, params: dict[str, Any], body: Any) -> Any:
        """Respond to a request which is no ordinary write."""
        name = unquote(path[1:])
        if path in _SETTINGS:
            return {'ok': True} if method == 'PUT' else _SETTINGS[path]
        if method == 'PUT':
            return self._put_design(name, body)
        if name.startswith('_design/') and '/_view/' not in name:
            if name not in self.designs:
                raise errors.NotFound(name)
            return self.designs[name]
        if path == '/_bulk_docs':
            return self._copy(body['docs'])
        if path == '':
            counts = {'doc_count': len(self.changed), 'doc_del_count': 0, 'sizes': {'file': 1}}
            return {
                **counts,
                'cluster': {'n': 1, 'q': 1},
                'update_seq': f'{len(self.changed)}',
                'compact_running': False,
            }
        if path == '/_changes':
            return self._changes(int(params['since']))
        if path == '/_all_docs' and str(params.get('startkey', '')).startswith('"_design/'):
            return {'rows': [{'id': i, 'value': {'rev': doc['_rev']}, 'doc': doc} for i, doc in self.designs.items()]}
        if path == '/_bulk_get' and params.get('revs'):
            return {'results': [{'id': one['id'], 'docs': self._with_history(one['id'])} for one in body['docs']]}
        return self.read(path or '/', params, body, 0)

    def _put_design(self, name: str, doc: Document) -> Document:
        stored = self.designs.get(name, {}).get('_rev')
        if doc.get('_rev') != stored:
            raise errors.Conflict(name)
        rev = f'{generation(stored) + 1 if stored else 1}-a'
        self.designs[name] = {**doc, '_rev': rev}
        if doc.get('_deleted'):
            del self.designs[name]
        return {'id': name, 'rev': rev}

    def _changes(self, since: int) -> Document:
        rows = []
        for doc_id, number in sorted(self.changed.items(), key=lambda pair: pair[1]):
            tree = self.nodes[0].trees.get(doc_id)
            if tree and number > since:
                found = leaves(tree)
                deleted = {'deleted': True} if all(tree[rev].deleted for rev in found) else {}
                rows.append({'id': doc_id, 'changes': [{'rev': rev} for rev in found], **deleted})
        return {'results': rows, 'last_seq': f'{max(self.changed.values(), default=0)}'}

    def _with_history(self, doc_id: str) -> list[Document]:
        if doc_id in self.designs:
            return [{'ok': {**self.designs[doc_id], '_revisions': {}}}]
        tree = self.nodes[0].trees.get(doc_id, {})
        found = []
        for leaf in leaves(tree):
            revs, rev = list[str](), cast('str | None', leaf)
            while rev is not None:
                revs.append(rev)
                rev = tree[rev].parent
            history = {'start': generation(leaf), 'ids': [rev.partition('-')[2] for rev in revs]}
            found.append({'ok': {**document(doc_id, tree, leaf), '_revisions': history}})
        return found

    def _copy(self, docs: Sequence[Document]) -> list[Document]:
        """Store revisions with their histories."""
        for doc in docs:
            if doc['_id'].startswith('_design/'):
                self.designs[doc['_id']] = doc
                continue
            start, ids = doc['_revisions']['start'], doc['_revisions']['ids']
            revs = [f'{start - number}-{digest}' for number, digest in enumerate(ids)]
            body = {name: value for name, value in doc.items() if not name.startswith('_')}
            tree = dict(self.nodes[0].trees.get(doc['_id'], {}))
            tree.setdefault(revs[0], Revision(revs[1] if revs[1:] else None, body, bool(doc.get('_deleted'))))
            for number, rev in enumerate(revs[1:], 2):
                tree.setdefault(rev, Revision(revs[number] if revs[number:] else None, {}, False))
            self.nodes[0].trees[doc['_id']] = tree
        self.note(doc['_id'] for doc in docs)
        return []


class Addressed(NamedTuple):
    """The method of a request, and the database to which it is sent."""

    method: str
    database: str


class MovingWorld(World):
    """A server with databases, and the processes that use the one of the location."""

    def __init__(self, nodes: int, salt: int = 0) -> None:
        self.databases: dict[str, Database] = {}
        self._salt = salt
        super().__init__(nodes, salt)
        self.databases[GIVEN] = Database(self, salt)
        self.rotations: dict[int, Rotation] = {}
        #: The items that were deleted.
        self.gone = set[str]()

    @property
    def present(self) -> str:
        """The name of the database to which requests are sent by who knows where it is."""
        location = self.databases.get(location_name(GIVEN))
        return str(location.designs[DOCUMENT]['database']) if location and DOCUMENT in location.designs else GIVEN

    @property
    def couchdb(self) -> Any:
        return self.databases[self.present]

    @couchdb.setter
    def couchdb(self, database: CouchDB) -> None:
        """The constructor makes one without names."""

    def client(self, skew: float) -> _ModelClient:
        return MovingClient(self, skew, Location(GIVEN))

    def close(self) -> None:
        super().close()
        for rotation in self.rotations.values():
            rotation.kill()

    def read(self, request: Request, at: int) -> Any:
        path, params = request.path, dict(request.params)
        method, name = params.pop(ADDRESSED)
        if path == '/':
            return {'couchdb': 'Welcome'}
        if path == '' and method == 'PUT':
            if name in self.databases:
                raise errors.Conflict(name)
            self.databases[name] = Database(self, self._salt)
            return {'ok': True}
        if name not in self.databases:
            raise errors.DatabaseMissing(name)
        if method == 'DELETE' and path == '':
            del self.databases[name]
            return {'ok': True}
        return self.databases[name].request(method, path, params, request.body)


class MovingHttp(Http):
    """Requests of one process, which stop until the test lets the server respond."""

    def __init__(self, client: MovingClient, location: Location) -> None:
        super().__init__(client.address, cast(Any, client.clock), (1.0, 1.0))
        self._client, self.location = client, location

    def _send(
        self, method: str, path: str | None, query: str = '', data: bytes | None = None, *args: Any, **more: Any
    ) -> Any:
        name = more['database']
        params = {key: _typed(value) for key, value in parse_qsl(query.lstrip('?'), keep_blank_values=True)}
        body = json.loads(data) if data else None
        answer = self._client.respond(Addressed(method, name), '/' if path is None else path, params, body)
        return SimpleNamespace(content=json.dumps(answer).encode(), status_code=200)


def _typed(value: str) -> Any:
    return {'true': True, 'false': False}.get(value, int(value) if value.isdecimal() else value)


class MovingClient(_ModelClient):
    """A client whose requests go through `Http`."""

    request = Client.request

    def __init__(self, world: MovingWorld, skew: float, location: Location) -> None:
        super().__init__(world, skew)
        self._moving, self._skew = world, skew
        self.address = self.address.beside(location.given, moves=location.moves)
        self.http = MovingHttp(self, location)

    def beside(self, database: str, *, moves: bool = True) -> Client:
        return MovingClient(self._moving, self._skew, Location(database, moves=moves))

    def respond(self, addressed: Addressed, path: str, params: dict[str, Any], body: Any) -> Any:
        """Stop until the test lets the server respond, and return the response."""
        docs = None
        if path == '/_bulk_docs' and body.get('new_edits', True):
            docs = body['docs']
        elif addressed.method == 'PUT' and isinstance(body, dict) and not body.get('_id', '_').startswith('_'):
            docs = [body]
        database = self._moving.databases.get(addressed.database)
        write = database.begin(docs) if docs and database else None
        answer = wait(Request(path, {**params, ADDRESSED: addressed}, body, write))
        self.clock.observe()
        return answer


class Rotation(Actor):
    """A command that moves the database, and may be killed."""

    #: Why it has failed.
    error: errors.CouchDBError | None = None

    def __init__(self, world: MovingWorld) -> None:
        super().__init__(world)
        self._moving = world
        self._thread = greenlet(self._rotate)
        self.waiting = self._thread.switch()

    def _rotate(self) -> None:
        client = MovingClient(self._moving, 0.0, Location(GIVEN))
        try:
            rotate(client, lambda *progress: None, age=0.0, wait=False)
        # Another one may run, or have deleted what this one copies to; the connection may break.
        except (Refused, errors.DatabaseMissing, errors.ServerUnavailable) as exc:
            self.error = exc

    def kill(self) -> None:
        """Kill the process."""
        self._thread.throw()

    def run(self, steps: int) -> None:
        """Let the command run past so many requests."""
        for _ in range(steps):
            if self.ended:
                return
            if isinstance(self.waiting, Sleep):
                self._moving.pass_time(self.waiting.timeout)
            self.go()


class Rotating(Single):
    """The database is moved again and again, by up to two commands at once, which may be killed or cut off."""

    @property
    def moving(self) -> MovingWorld:
        """The world, which `begin` makes."""
        return cast(MovingWorld, self.world)

    def make_world(self, salt: int) -> World:
        for owner, method, answer in ((Cluster, 'nodes', []), (Indexes, 'process_latest', 0.0), (Indexes, 'size', 0)):
            self.stack.enter_context(mock.patch.object(owner, method, return_value=answer))
        return MovingWorld(self.nodes, salt)

    @rule(which=COMMAND, steps=st.sampled_from([1, 5, 30, 60]))
    def rotate(self, which: int, steps: int) -> None:
        """A command begins, or goes on."""
        if which not in self.moving.rotations or self.moving.rotations[which].ended:
            self.moving.rotations[which] = Rotation(self.moving)
        self.moving.rotations[which].run(steps)

    @rule(first=PROCESS, at=NODE)
    @precondition(lambda self: not self.world.couchdb.is_closed and not self.waits())
    def hang(self, first: int, at: int) -> None:
        """The server responds to no process for longer than a lease, while the database is open."""
        super().hang(first, at)

    @rule(wrong=st.sampled_from(WRONG))
    @precondition(lambda self: not self.world.couchdb.is_closed and not self.waits())
    def set_server_clock(self, wrong: float) -> None:
        """The server's clock is set, but not while heartbeats wait that were made before."""
        super().set_server_clock(wrong)

    def waits(self) -> bool:
        """Tell whether a process waits in the middle of a pass until the database is open."""
        return any(
            isinstance(p.waiting, Sleep) and p.waiting.timeout <= MAX_PAUSE_SECONDS for p in self.world.processes
        )

    @rule(which=COMMAND)
    @precondition(lambda self: self.moving.rotations)
    def kill_rotation(self, which: int) -> None:
        """A command is killed; a request that it has sent may still be executed."""
        if rotation := self.moving.rotations.pop(which, None):
            rotation.kill()

    @rule(which=COMMAND)
    @precondition(lambda self: any(rotation.asks for rotation in self.moving.rotations.values()))
    def cut_rotation(self, which: int) -> None:
        """The connection of a command breaks."""
        rotation = self.moving.rotations.get(which)
        if rotation and rotation.asks:
            rotation.cut()

    @invariant()
    def nothing_comes_back(self) -> None:
        """Check that what was deleted stays deleted."""
        if self._world:
            gone = {name for name in ('a', 'b') if self.is_gone(name)}
            assert gone >= self.moving.gone, f'{self.moving.gone - gone} came back'
            self.moving.gone = gone

    def is_gone(self, name: str) -> bool:
        tree = self.world.couchdb.tree(name)
        return all(tree[rev].deleted for rev in leaves(tree))

    def end_faults(self) -> None:
        """Finish the last move, and end the other faults."""
        self.world.wrong = 0.0
        for rotation in self.moving.rotations.values():
            rotation.kill()
        last = Rotation(self.moving)
        last.run(500)
        assert last.ended, f'the move does not end: {last.waiting}'
        assert last.error is None, f'the move has failed: {last.error!r}'
        super().end_faults()
