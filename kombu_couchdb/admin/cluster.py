"""The server below one database: what must be so, on all of its nodes, before anything is purged."""

from __future__ import annotations

import re
import time
from urllib.parse import quote

from ..couchdb.client import Client
from ..couchdb.shapes import items, maybe, members, number, text
from ..errors import AccessDenied, CouchDBError, describe_user

__all__ = ['Cluster', 'Refused']

#: How long to wait for the nodes to have told each other everything, in seconds.
_SYNC = 60.0

#: What the server says of its nodes, of one of them, and of what they do just now.
_MEMBERSHIP = members(cluster_nodes=items(text), all_nodes=items(text))
_SYSTEM = members(uptime=number, internal_replication_jobs=maybe(number))
_TASKS = items(members(type=text))


class Refused(CouchDBError):
    """What was asked for is not possible here, or not safe now; the text says what to change."""


class Cluster:
    """The server or servers that keep the database of `client`."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.server = Client(client.address.root)

    def check(self) -> None:
        """Make sure that this is an Apache CouchDB and the user its administrator.

        *Raises* `Refused` if it is the embedded server, `AccessDenied`.
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
        """Return the names of all nodes; *raises* `Refused` if one is down."""
        answer = self.server.request('GET', '/_membership', repeat=True, shape=_MEMBERSHIP)
        down = sorted(set(answer['cluster_nodes']) - set(answer['all_nodes']))
        if down:
            raise Refused(
                f'{self.client.address.server}: node {down[0]} is down, and what is purged now would come back from '
                f'it: start it, or take it out of the cluster'
            )
        return sorted(answer['cluster_nodes'])

    def synchronise(self, age: float) -> None:
        """Wait until the nodes have told each other of what is older than `age` seconds.

        *Raises* `Refused` if one was started later than that, or if it takes too long.
        """
        nodes, deadline = self.nodes(), time.monotonic() + _SYNC
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
                        f'try again when less is to be done'
                    )
                time.sleep(0.1)

    def busy(self, *kinds: str) -> bool:
        """Tell whether any node works on the database in one of these ways, as `_active_tasks` calls them."""
        tasks = self.server.request('GET', '/_active_tasks', repeat=True, shape=_TASKS)
        part = re.compile(rf'shards/[^/]*/{re.escape(self.client.address.database)}\.\d+')
        return any(task['type'] in kinds and part.match(str(task.get('database'))) for task in tasks)
