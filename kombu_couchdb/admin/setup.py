"""Setup of a database, after which workers and publishers need only the rights of a member.

`plan` compares the database with what is wanted and returns one step for each goal. A step whose goal is already met
has nothing to do, so you can run the setup again, and while workers run. A managed service may not offer what a step
needs; such a step is skipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import cast

from ..couchdb.client import Client, Document
from ..couchdb.shapes import DONE, items, maybe, members, number, rows, text
from ..errors import NOBODY, AccessDenied, Conflict, DatabaseMissing, NotOffered

#: The shape of the response to `/_security`.
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
    #: The app has no user that is known. Rights are then left as they are, unless `members` is given.
    anonymous: bool = False
    #: The maximum number of revisions that CouchDB keeps of a document; None leaves the setting as it is.
    revisions: int | None = None
    #: A client for a database whose users may also use this one; `members` and `anonymous` are those of that database.
    users_of: Client | None = None
    #: The users of the app send tokens, so that they need no documents in `_users`.
    by_token: bool = False


@dataclass(frozen=True)
class Step:
    """One step of the setup."""

    #: A sentence that is true after the step.
    goal: str
    #: The function that reaches the goal; None if the goal is already met, or for a notice.
    do: Callable[[], object] | None = None
    #: The step only tells the administrator something, for example what to do by hand.
    notice: bool = False
    #: Why the service cannot do this step, as a sentence; None if it can, as far as the plan knows.
    not_offered: str | None = None


def plan(wanted: Wanted) -> list[Step]:
    """Return the steps that bring a database into the wanted state, in order. It changes nothing.

    *Raises* `AccessDenied` if a step has something to do and the user lacks the rights.
    """
    client = wanted.client
    native = 'couchdb' in client.welcome()
    try:
        user = client.session()
    except NotOffered:
        user = None
    try:
        stored = _stored(client)
        exists = stored is not None
        steps = [
            Step('the database exists', None if exists else client.create),
            *_documents(client, wanted.documents, stored or {}),
            *(_revisions(client, wanted.revisions, exists) if wanted.revisions and native else ()),
            *(_same_users(wanted, wanted.users_of, exists) if wanted.users_of else _rights(wanted, exists)),
            *(_users(client, wanted.members) if native and not (wanted.users_of or wanted.by_token) else ()),
        ]
        may_change = not any(step.do for step in steps) or _administers(client, user, exists)
    except AccessDenied as exc:
        raise _denied(client) from exc
    if not may_change:
        raise _denied(client)
    return steps


def _step(goal: str, find: Callable[[], Callable[[], object] | None]) -> Step:
    """Return the step to a goal; `find` returns what to do, None if nothing is."""
    try:
        return Step(goal, find())
    except NotOffered as exc:
        return Step(goal, not_offered=str(exc))


# -- design documents


def _stored(client: Client) -> dict[str, Document] | None:
    """Return the design documents by their ids; None if the database does not exist."""
    try:
        return {row['id']: row['doc'] for row in client.id_range('_design/', docs=True)}
    except DatabaseMissing:
        return None


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


def _rights(wanted: Wanted, exists: bool) -> list[Step]:
    client, steps = wanted.client, list[Step]()

    def secure() -> Callable[[], object] | None:
        security = _security(client) if exists else {}
        return None if _secured(security, wanted.members) == security else partial(_secure, client, wanted.members)

    if wanted.members or not wanted.anonymous:
        among = f', among them {", ".join(wanted.members)}' if wanted.members else ''
        steps.append(_step(f'only administrators and members may read and write{among}', secure))
    if wanted.anonymous:
        steps.append(
            Step(
                'the token of the app does not name its user: make it a member with --member, or give it its rights '
                'where the token comes from'
                if wanted.by_token
                else 'the URL of the app names no user: CouchDB will refuse its workers, unless everybody may read and '
                'write the database; put user:password@ before the host',
                notice=True,
            )
        )
    return steps


def _users(client: Client, names: Sequence[str]) -> list[Step]:
    """Return a notice for each user that does not exist."""
    try:
        return [
            Step(f'there is no user {name!r} yet: create it in CouchDB, as a document in _users', notice=True)
            for name in names
            if user_exists(client, name) is False
        ]
    except NotOffered as exc:
        return [Step(f'these users exist: {", ".join(names)}', not_offered=str(exc))]


def _same_users(wanted: Wanted, other: Client, exists: bool) -> list[Step]:
    """Return the step that copies the rights of the database `other`."""
    client = wanted.client

    def copy() -> None:
        client.request('PUT', '/_security', body=_security(other), shape=DONE)

    def copy_if_changed() -> Callable[[], object] | None:
        try:
            later = _security(other)
        except DatabaseMissing:
            later = {}
        if wanted.members or not wanted.anonymous:
            later = _secured(later, wanted.members)
        return None if exists and _security(client) == later else copy

    return [_step(f'those who may use {other.address.database} may read and write', copy_if_changed)]


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
    def lower() -> Callable[[], object] | None:
        if exists and client.request('GET', '/_revs_limit', repeat=True, shape=number) <= limit:
            return None
        return partial(client.request, 'PUT', '/_revs_limit', body=limit, shape=DONE)

    return [_step(f'at most {limit} revisions of a document are remembered', lower)]


def _administers(client: Client, user: Document | None, exists: bool) -> bool:
    """Tell whether a user, which is from `_session`, may change a database; True if the service does not tell."""
    if user is None or '_admin' in user['roles']:
        return True
    try:
        admins = (_security(client) if exists else {}).get('admins') or {}
    except NotOffered:
        return True
    return user['name'] in (admins.get('names') or ()) or not {*user['roles']}.isdisjoint(admins.get('roles') or ())


def _denied(client: Client) -> AccessDenied:
    return AccessDenied(
        f'{client.address.url}: {client.who or NOBODY} may not set up the database; name an administrator of '
        f'CouchDB with --admin'
    )


def user_exists(client: Client, user: str) -> bool | None:
    """Tell whether a user exists; None if the rights do not suffice to find out. *Raises* `NotOffered`."""
    ask = partial(client.request, 'GET', repeat=True, is_of_server=True)
    try:
        with suppress(NotOffered):  # server administrators in the configuration have no document in `_users`
            if user in ask('/_node/_local/_config/admins', shape=members()):
                return True
        # A missing document, of all that `_users` can lack, must not look like a service without `_users`.
        key = {'key': json.dumps(f'org.couchdb.user:{user}')}
        return bool(ask('/_users/_all_docs', key, shape=rows())['rows'])
    except AccessDenied:
        return None
