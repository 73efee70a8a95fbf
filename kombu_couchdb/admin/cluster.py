"""The server with its nodes, and the indexes of one database, while tombstones are purged.

If a document is purged before an index has processed its deletion, and the index is compacted at the wrong time, the
document's row stays in the index forever (measured with CouchDB 3.5). So every copy of every index must process all
deletions before a purge. On a cluster, a view request goes to every copy, but the fastest copy responds, and `_info`
describes one copy only. So `Indexes` also waits until `_active_tasks`, which covers all nodes, lists no index task.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from ..couchdb.client import Client
from ..couchdb.shapes import DONE, Shape, items, maybe, members, number, text
from ..errors import NOBODY, AccessDenied, ConfigurationError, CouchDBError, NotFound, ServerUnavailable

#: How long to wait until the nodes of a cluster have replicated all changes to each other.
_REPLICATION_SECONDS = 60.0

#: The shapes of the server's responses about its nodes, about one node, and about running tasks.
_MEMBERSHIP = members(cluster_nodes=items(text), all_nodes=items(text))
_SYSTEM = members(uptime=number, internal_replication_jobs=maybe(number))
_TASKS = items(members(type=text))

#: The shape of the response to a purge.
_PURGED = members(purged=members())

#: How long tasks on an index may run before the vacuum gives up.
_BUSY_SECONDS = 300.0

#: On a cluster all indexes are updated this many times, with a pause, because a copy may miss a request.
_ROUNDS, _PAUSE_SECONDS = 3, 1.0

#: The shape of CouchDB's response about an index.
_INFO = members(view_index=members(sizes=members(file=number)))


class Refused(CouchDBError):
    """The operation is not possible on this server, or not safe now. The text says what to change. Not retried."""


class Cluster:
    """The server, or all nodes of the cluster, with the database of `client`."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def check(self) -> None:
        """Check that the server is Apache CouchDB, offers what a purge needs, and the user is a server administrator.

        *Raises* `Refused` for the embedded server, `NotOffered` for services without it, and `AccessDenied` for other
        users.
        """
        if 'couchdb' not in self.client.welcome():
            raise Refused(
                f'{self.client.address.server} is the embedded server, which keeps everything in memory: '
                f'only Apache CouchDB needs a vacuum, and can do it'
            )
        try:
            self.purge({})
            self.nodes()
            self.busy()
        except AccessDenied as exc:
            if exc.status != 403 and 'server admin' not in str(exc):
                raise  # the password is wrong
            raise AccessDenied(
                f'{self.client.address.url}: {self.client.who or NOBODY} is no server administrator, and '
                f'CouchDB lets nobody else purge: name one with --admin'
            ) from exc

    def purge(self, revs: Mapping[str, Sequence[str]]) -> None:
        """Purge these revisions, by the ids of their documents."""
        self.client.request('POST', '/_purge', body=revs, repeat=True, shape=_PURGED)

    def nodes(self) -> list[str]:
        """Return the names of all nodes; *raises* `Refused` if a node is down."""
        response = self._server('/_membership', _MEMBERSHIP)
        down = sorted(set(response['cluster_nodes']) - set(response['all_nodes']))
        if down:
            raise Refused(
                f'{self.client.address.server}: node {down[0]} is down, and what is purged now would come back from '
                f'it: start it, or take it out of the cluster'
            )
        return sorted(response['cluster_nodes'])

    def synchronise(self, age: float) -> None:
        """On a cluster, wait until no node has changes to send to other nodes.

        *Raises* `Refused` if this takes more than 60 seconds, or if a node was started less than `age` seconds ago.
        """
        nodes, deadline = self.nodes(), time.monotonic() + _REPLICATION_SECONDS
        for node in nodes if len(nodes) > 1 else ():
            while True:
                system = self._server(f'/_node/{quote(node)}/_system', _SYSTEM)
                if system['uptime'] < age:
                    raise Refused(
                        f'{self.client.address.server}: node {node} was started {system["uptime"]} s ago, and may not '
                        f'know yet what was deleted before: try again when it has been up for {age:.0f} s'
                    )
                if not system.get('internal_replication_jobs'):
                    break
                if time.monotonic() > deadline:
                    raise Refused(
                        f'{self.client.address.server}: node {node} still sends the other nodes what they missed: '
                        f'try again when fewer changes are pending'
                    )
                time.sleep(0.1)

    def busy(self, *kinds: str) -> bool:
        """Tell whether any node runs a task of one of these types on the database; the types are `_active_tasks`'."""
        tasks = self._server('/_active_tasks', _TASKS)
        part = re.compile(rf'shards/[^/]*/{re.escape(self.client.address.database)}\.\d+')
        return any(task['type'] in kinds and part.match(str(task.get('database'))) for task in tasks)

    def _server(self, path: str, shape: Shape) -> Any:
        return self.client.request('GET', path, repeat=True, is_of_server=True, shape=shape)


class Indexes:
    """All indexes of one database."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._client = cluster, cluster.client
        self._views = self._read()

    def without_views(self) -> list[str]:
        """Return the names of the design documents without a view.

        CouchDB keeps a note of each purge until the index of every design document has confirmed it. An index without
        a view never does, and no request can make it.
        """
        return [name for name, view in self._views.items() if view is None]

    def size(self) -> int:
        """Return the size of the files of all indexes, in bytes."""
        return sum(self._size(name) for name in self._with_views())

    def bring_up_to_date(self) -> None:
        """Bring every copy of every index up to date. Indexes that were never built are built.

        CouchDB would keep a note of each purge for those. *Raises* `IndexNotReady` if CouchDB needs longer than the
        client waits, and `Refused` if an index cannot be brought up to date, or is still being built or compacted
        after 300 seconds.
        """
        self._views = self._read()
        for number_of_round in range(_ROUNDS if self._client.is_cluster() else 1):
            if number_of_round:
                time.sleep(_PAUSE_SECONDS)
            self.process_latest()
            self._wait_until_idle()

    def process_latest(self) -> float:
        """Make every index process the latest changes. Return the time that the slowest index took, in seconds."""
        slowest = 0.0
        for name, view in self._with_views().items():
            began = time.monotonic()
            self._update(name, view)
            slowest = max(slowest, time.monotonic() - began)
        return slowest

    def clean_up(self) -> None:
        """Delete the files of indexes without a design document."""
        self._client.request('POST', '/_view_cleanup', shape=DONE)

    def compact(self) -> None:
        """Start the compaction of all indexes."""
        for name in self._with_views():
            self._client.request('POST', f'/_compact/{name}', shape=DONE)

    def _with_views(self) -> dict[str, str]:
        return {quote(name, safe=''): quote(view, safe='') for name, view in self._views.items() if view is not None}

    def _read(self) -> dict[str, str | None]:
        """Return the names of the design documents, each with the name of one of its views, if it has any."""
        found: dict[str, str | None] = {}
        for row in self._client.id_range('_design/', docs=True):
            views = row['doc'].get('views')
            views = views if isinstance(views, dict) else {}
            maps = (name for name, view in views.items() if isinstance(view, dict) and 'map' in view)
            found[row['id'].removeprefix('_design/')] = next(maps, None)
        return found

    def _wait_until_idle(self) -> None:
        """Wait until no node works on an index. A compaction that started earlier would bring old rows back.

        *Raises* `Refused` after 300 seconds.
        """
        since = time.monotonic()
        while self._cluster.busy('indexer', 'view_compaction'):
            if time.monotonic() - since > _BUSY_SECONDS:
                raise Refused(
                    f'{self._client.address.url}: its indexes are being built or compacted; try again after that'
                )
            time.sleep(0.05)

    def _update(self, name: str, view: str) -> None:
        try:
            self._client.view(name, view, limit=0, reduce=False)
        except NotFound:
            pass  # the design document was deleted meanwhile, and with it the index
        except CouchDBError as exc:
            if isinstance(exc, ConfigurationError) or (isinstance(exc, ServerUnavailable) and exc.status is None):
                raise  # the connection failed, or the index needs more time
            raise Refused(
                f'{self._client.address.url}/_design/{name}: this index cannot be brought up to date, and a purge '
                f'would leave wrong rows in it; repair or delete its design document ({exc})'
            ) from exc

    def _size(self, name: str) -> int:
        try:
            info = self._client.request('GET', f'/_design/{name}/_info', repeat=True, shape=_INFO)
        except NotFound:
            return 0
        return int(info['view_index']['sizes']['file'])
