"""Job ids on the command line, which may be abbreviated to their first characters."""

from __future__ import annotations

import click

from kombu_couchdb.admin.jobs import complete, find
from kombu_couchdb.couchdb.client import Client

__all__ = ['resolve_id']

#: The minimum length of an abbreviated id, in characters.
_MIN_CHARACTERS = 4

#: The maximum number of ids that the error for an ambiguous abbreviation lists.
_MAX_LISTED = 10


def resolve_id(client: Client, name: str, *, dead: bool = False) -> str:
    """Return the full id of the job whose id is `name` or begins with it. With `dead`, search dead letters only.

    Return `name` itself if there is no such job. *Raises* `ClickException` if several ids begin with `name`, or if one
    does and `name` has fewer than 4 characters.
    """
    if any(doc.get('status') or not dead for doc in find(client, name)):
        return name
    found = complete(client, name, dead=dead)
    if found and len(name) < _MIN_CHARACTERS:
        raise click.ClickException(f'{name!r} is too short: give at least {_MIN_CHARACTERS} characters of an id')
    if len(found) > 1:
        more = f' and {len(found) - _MAX_LISTED} more' if len(found) > _MAX_LISTED else ''
        raise click.ClickException(f'several ids begin with {name!r}: {", ".join(found[:_MAX_LISTED])}{more}')
    return found[0] if found else name
