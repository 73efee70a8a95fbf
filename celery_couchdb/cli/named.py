"""Jobs that are named by their ids, or by how these begin."""

from __future__ import annotations

import click

from kombu_couchdb.admin.jobs import complete, find
from kombu_couchdb.couchdb.client import Client

__all__ = ['whole']

#: The fewest characters of an id that stand for all of it.
_LEAST = 4

#: How many ids are listed, of those that begin with what was given.
_LISTED = 10


def whole(client: Client, name: str, *, dead: bool = False) -> str:
    """Return the id of the one job that `name` stands for: it is that id, or begins it; with `dead`, of a dead letter.

    Return `name` itself if no job begins so. *Raises* `ClickException` with the candidates if several do.
    """
    if len(name) < _LEAST or any(doc.get('status') or not dead for doc in find(client, name)):
        return name
    found = complete(client, name, dead=dead)
    if len(found) > 1:
        more = f' and {len(found) - _LISTED} more' if len(found) > _LISTED else ''
        raise click.ClickException(f'several ids begin with {name!r}: {", ".join(found[:_LISTED])}{more}')
    return found[0] if found else name
