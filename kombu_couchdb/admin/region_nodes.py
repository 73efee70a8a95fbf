"""The node of another region from which a replication pulls.

The URL of a region may name several nodes of a cluster, and CouchDB's replicator takes one. The URL of the source is a
part of the id under which CouchDB remembers how far a replication has come. So the node stays the same as long as it
responds: with another one CouchDB reads all changes of the source again.
"""

from __future__ import annotations

from dataclasses import replace

from ..couchdb.address import Address
from ..couchdb.client import Client
from ..errors import AccessDenied, CouchDBError

__all__ = ['chosen', 'named', 'responds']

#: The time limit of a node's response.
_TIMEOUT_SECONDS = 3.0


def chosen(address: Address, server: str | None) -> Address:
    """Return the address of one node: `server`, the URL of the one in use, or else the first one that responds.

    If none responds, that in use is returned, or else the first. A single node is not asked.
    """
    used = named(address, server)
    found = [used] if used else []
    found += [node for node in _nodes(address) if node != used]
    return next((node for node in found if len(found) == 1 or responds(node)), found[0])


def named(address: Address, server: str | None) -> Address | None:
    """Return the address of the node with the URL `server`; None if the cluster has no such node."""
    return next((node for node in _nodes(address) if node.server == server), None)


def responds(node: Address) -> bool:
    """Tell whether a node responds to this machine; one that refuses the user does."""
    client = Client(node.root, _TIMEOUT_SECONDS, _TIMEOUT_SECONDS)
    try:
        client.welcome()
    except AccessDenied:
        pass
    except CouchDBError:
        return False
    finally:
        client.close()
    return True


def _nodes(address: Address) -> list[Address]:
    return [replace(node, others=()) for node in (address, *address.others)]
