"""Checks of the server and its nodes before tombstones are purged."""

from __future__ import annotations

import re
import time
from urllib.parse import quote

from ..couchdb.client import Client
from ..couchdb.shapes import items, maybe, members, number, text
from ..errors import AccessDenied, CouchDBError, describe_user

#: How long to wait until the nodes of a cluster have replicated all changes to each other.
_REPLICATION_SECONDS = 60.0

#: The shapes of the server's responses about its nodes, about one node, and about running tasks.
_MEMBERSHIP = members(cluster_nodes=items(text), all_nodes=items(text))
_SYSTEM = members(uptime=number, internal_replication_jobs=maybe(number))
_TASKS = items(members(type=text))


class Refused(CouchDBError):
    """The operation is not possible on this server, or not safe now. The text says what to change. Not retried."""


class Cluster:
    """The server, or all nodes of the cluster, with the database of `client`."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.server = Client(client.address.root)

    def check(self) -> None:
        """Check that the server is Apache CouchDB and the user a server administrator.

        *Raises* `Refused` for the embedded server, and `AccessDenied` for other users.
        """
        if 'couchdb' not in self.client.welcome():
            raise Refused(
                f'{self.client.address.server} is the embedded server, which keeps everything in memory: '
                f'only Apache CouchDB needs a vacuum, and can do it'
            )
        try:
            self.nodes()
        except AccessDenied as exc:
            if 'server admin' not in str(exc):
                raise  # the password is wrong
            raise AccessDenied(
                f'{self.client.address.url}: {describe_user(self.client.user)} is no server administrator, and '
                f'CouchDB lets nobody else purge: name one with --admin'
            ) from exc

    def nodes(self) -> list[str]:
        """Return the names of all nodes; *raises* `Refused` if a node is down."""
        response = self.server.request('GET', '/_membership', repeat=True, shape=_MEMBERSHIP)
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
                system = self.server.request('GET', f'/_node/{quote(node)}/_system', repeat=True, shape=_SYSTEM)
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
        tasks = self.server.request('GET', '/_active_tasks', repeat=True, shape=_TASKS)
        part = re.compile(rf'shards/[^/]*/{re.escape(self.client.address.database)}\.\d+')
        return any(task['type'] in kinds and part.match(str(task.get('database'))) for task in tasks)
