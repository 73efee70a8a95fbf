"""Setup of a database, after which workers and publishers need only the rights of a member.

`plan` compares the database with what is wanted and returns one step for each goal. A step whose goal is already met
has nothing to do, so you can run the setup again, and while workers run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast
from urllib.parse import quote

from ..couchdb.client import Client, Document
from ..couchdb.shapes import DONE, equal, items, maybe, members, number, text
from ..errors import AccessDenied, Conflict, DatabaseMissing, NotFound, describe_user

#: The shapes of the responses to `/_session` and `/_security`.
_SESSION = members(userCtx=members(name=maybe(text), roles=items(text)))
_NAMED = maybe(members(names=maybe(items(text)), roles=maybe(items(text))))
_SECURITY = members(admins=_NAMED, members=_NAMED)


@dataclass(frozen=True)
class Wanted:
    """The wanted state of a database."""

    #: A client for the database, with an administrator's rights.
    client: Client
    #: The design documents, without revisions.
    documents: Sequence[Document]
    #: The users who can read and write.
    members: Sequence[str] = ()
    #: The app has no user, neither in the URL nor by `credentials`. Rights are then left as they are, unless `members`
    #: is given.
    anonymous: bool = False
    #: The maximum number of revisions that CouchDB keeps of a document; None leaves the setting as it is.
    revisions: int | None = None
    #: A client for a database whose users may also use this one; `members` and `anonymous` are those of that database.
    users_of: Client | None = None


@dataclass(frozen=True)
class Step:
    """One step of the setup."""

    #: A sentence that is true after the step.
    goal: str
    #: The function that reaches the goal; None if the goal is already met, or for a notice.
    do: Callable[[], object] | None = None
    #: The step only tells the administrator something, for example what to do by hand.
    notice: bool = False


def plan(wanted: Wanted) -> list[Step]:
    """Return the steps that bring a database into the wanted state, in order. It changes nothing.

    *Raises* `AccessDenied` if a step has something to do and the user lacks the rights.
    """
    client = wanted.client
    native = 'couchdb' in client.welcome()
    user = _server(client).request('GET', '/_session', repeat=True, shape=_SESSION)['userCtx']
    try:
        exists = True
        security = _security(client)
        stored = {row['id']: row['doc'] for row in client.id_range('_design/', docs=True)}
    except DatabaseMissing:
        exists, security, stored = False, {}, {}
    except AccessDenied as exc:
        raise _denied(client) from exc
    steps = [
        Step('the database exists', None if exists else client.create),
        *_documents(client, wanted.documents, stored),
        *(_revisions(client, wanted.revisions, exists) if wanted.revisions and native else ()),
        *(_same_users(wanted, wanted.users_of, security if exists else None) if wanted.users_of else ()),
        *(_rights(wanted, security) if not wanted.users_of else ()),
    ]
    if any(step.do for step in steps) and not _administers(user, security):
        raise _denied(client)
    return steps


# -- design documents


def _documents(client: Client, documents: Sequence[Document], stored: Mapping[str, Document]) -> list[Step]:
    changed = [doc for doc in documents if {**stored.get(doc['_id'], {}), '_rev': None} != {**doc, '_rev': None}]
    steps = [
        Step(f'{doc["_id"]} is up to date', partial(_store, client, doc) if doc in changed else None)
        for doc in documents
    ]
    if any(doc['_id'] in stored for doc in changed):
        clean_up = partial(client.request, 'POST', '/_view_cleanup', shape=DONE)
        steps.append(Step('indexes without a view are removed', clean_up))
    return steps


def _store(client: Client, doc: Document) -> None:
    current = client.find([doc['_id']])[0]
    try:
        client.put({**doc, '_rev': current['_rev']} if current else doc)
    except Conflict:
        pass  # another process has just stored the same document


# -- rights and limits


def _rights(wanted: Wanted, security: Document) -> list[Step]:
    client, steps = wanted.client, []
    if wanted.members or not wanted.anonymous:
        among = f', among them {", ".join(wanted.members)}' if wanted.members else ''
        steps.append(
            Step(
                f'only administrators and members may read and write{among}',
                None if _secured(security, wanted.members) == security else partial(_secure, client, wanted.members),
            )
        )
    if wanted.anonymous:
        steps.append(
            Step(
                'the URL of the app names no user: CouchDB will refuse its workers, unless everybody may read and '
                'write the database; put user:password@ before the host',
                notice=True,
            )
        )
    return steps + [
        Step(f'there is no user {name!r} yet: create it in CouchDB, as a document in _users', notice=True)
        for name in wanted.members
        if user_exists(client, name) is False
    ]


def _same_users(wanted: Wanted, other: Client, security: Document | None) -> list[Step]:
    """Return the step that copies the rights of the database `other`; `security` is None for a missing database."""
    client = wanted.client

    def copy() -> None:
        client.request('PUT', '/_security', body=_security(other), shape=DONE)

    try:
        later = _security(other)
    except DatabaseMissing:
        later = {}
    if wanted.members or not wanted.anonymous:
        later = _secured(later, wanted.members)
    return [Step(f'those who may use {other.address.database} may read and write', None if security == later else copy)]


def _secured(security: Document, members: Sequence[str]) -> Document:
    """Return the `_security` object with these members added. A public database is no longer public with it."""
    section = security.get('members') or {}
    names, roles = list(section.get('names') or ()), list(section.get('roles') or ())
    if not names and not roles:
        roles = ['_admin']
    names += [name for name in members if name not in names]
    # Add only lists with content: the result must equal `security` if there is nothing to add.
    return {
        **security,
        'members': {**section, **({'names': names} if names else {}), **({'roles': roles} if roles else {})},
    }


def _security(client: Client) -> Document:
    return cast(Document, client.request('GET', '/_security', repeat=True, shape=_SECURITY))


def _secure(client: Client, members: Sequence[str]) -> None:
    client.request('PUT', '/_security', body=_secured(_security(client), members), shape=DONE)


def _revisions(client: Client, limit: int, exists: bool) -> list[Step]:
    enough = exists and client.request('GET', '/_revs_limit', repeat=True, shape=number) <= limit
    do = None if enough else partial(client.request, 'PUT', '/_revs_limit', body=limit, shape=DONE)
    return [Step(f'at most {limit} revisions of a document are remembered', do)]


def _administers(user: Document, security: Document) -> bool:
    """Tell whether a user may change a database. `user` is from `_session`; `security` is {} for a missing database."""
    admins, roles = security.get('admins') or {}, set(user.get('roles') or ())
    return (
        '_admin' in roles
        or user.get('name') in (admins.get('names') or ())
        or bool(roles & set(admins.get('roles') or ()))
    )


def _denied(client: Client) -> AccessDenied:
    return AccessDenied(
        f'{client.address.url}: {describe_user(client.user)} may not set up the database; name an administrator of '
        f'CouchDB with --admin'
    )


def user_exists(client: Client, user: str) -> bool | None:
    """Tell whether a user exists; None if the rights do not suffice to find out.

    Server administrators in the configuration have no document in `_users`.
    """
    server = _server(client)
    try:
        if user in server.request('GET', '/_node/_local/_config/admins', repeat=True, shape=members()):
            return True
    except (AccessDenied, DatabaseMissing, NotFound):
        return None
    try:
        doc_id = f'org.couchdb.user:{user}'
        server.request('GET', f'/_users/{quote(doc_id, safe="")}', repeat=True, shape=members(_id=equal(doc_id)))
        return True
    except (DatabaseMissing, NotFound):
        return False


def _server(client: Client) -> Client:
    return Client(client.address.root)
