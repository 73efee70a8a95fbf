"""Replications: the documents in the database `_replicator` of the own server, its replicator, and regions' nodes.

A region *pulls*: its own server reads the databases of the other regions and writes into its own. For each other region
there are two replications, one of the database of regions and one of results. Both run continuously, and both are
selective: CouchDB's replicator asks the source for documents with certain ids, or with a certain member `to`.

The URL of a region may name several nodes of a cluster, and the replicator takes one. The URL of the source is a part
of the id under which CouchDB remembers how far a replication has come. So the node stays the same as long as it
responds: with another one CouchDB reads all changes of the source again.

Regions need settings of the replicator, on each node of the own server:

* After a failure the replicator waits 30 seconds before it tries a replication again, after the next one a minute, and
  so on up to eight hours. It computes the wait from the events that it remembers of a replication: with two events the
  wait is always 30 seconds, see `max_history` in CouchDB's documentation. Every `interval` it looks for replications
  whose wait is over.
* Without further settings it accepts every TLS certificate.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import quote, unquote

from ..admin.setup import Step
from ..couchdb.address import Address, redacted
from ..couchdb.auth import user_and_password
from ..couchdb.client import Client, Document
from ..couchdb.shapes import items, maybe, members, rows, text
from ..errors import AccessDenied, ConfigurationError, Conflict, CouchDBError, DatabaseMissing, describe_user

_PATH = '/_replicator'

#: The member of a document that `nudge` changes: the milliseconds between two checkpoints. CouchDB starts a replication
#: again only if a member changes that it uses. This one is not a part of the id under which CouchDB remembers how far
#: the replication has come. The two values alternate; neither may be the default, 30,000, which would change nothing.
_NUDGED, _VALUES = 'checkpoint_interval', (30_001, 30_002)

#: The time limit of a node's response.
_NODE_SECONDS = 3.0

#: The settings that bound the wait: the number of events, and milliseconds.
BOUNDED = {'max_history': '2', 'interval': '5000'}

_VERIFY, _TRUSTED = 'verify_ssl_certificates', 'ssl_trusted_certificates_file'

#: Addresses at which a node also listens on the loopback interface, and the host in its URL there.
_LOOPBACK = {'127.0.0.1': '127.0.0.1', '0.0.0.0': '127.0.0.1', 'any': '127.0.0.1', '::': '127.0.0.1', '::1': '[::1]'}


def endpoint(address: Address, server: str | None = None) -> Document:
    """Return the source or target of a replication; `server` is the URL of its server, if the replicator has another.

    It contains the password.
    """
    user, password = user_and_password(address) or (None, '')
    url = f'{server or address.server}/{quote(address.database, safe="")}'
    return {'url': url, **({'auth': {'basic': {'username': user, 'password': password}}} if user else {})}


def server_of(client: Client) -> Client:
    """Return a client for the server of a database."""
    return Client(client.address.root, *reversed(client.timeouts))


def id_of(kind: str, own: str, other: str) -> str:
    """Return the id of the document for `kind`, `regions` or `results`."""
    return f'celery-{kind}-{own}-from-{other}'


def replication(doc_id: str, source: Document, target: Document, selector: Document) -> Document:
    """Return the document of a continuous replication of what matches `selector`; see `endpoint`."""
    return {'_id': doc_id, 'source': source, 'target': target, 'continuous': True, 'selector': selector}


def stored(server: Client, own: str) -> dict[str, Document] | None:
    """Return the stored replications of region `own`, by id; None if the server has no database `_replicator`.

    `server` is a client for the server, see `Address.root`. *Raises* `AccessDenied` for others than administrators.
    """
    return read(server, *(beginning_with(id_of(kind, own, '')) for kind in ('regions', 'results')))


def beginning_with(prefix: str) -> Document:
    """Return the parameters of `_all_docs` for all documents whose ids begin with `prefix`."""
    return {'startkey': json.dumps(prefix), 'endkey': json.dumps(f'{prefix}\ufff0')}


def read(server: Client, *asked: Document) -> dict[str, Document] | None:
    """Return replications by id, for parameters of `_all_docs`; None if the server has no database `_replicator`.

    *Raises* `AccessDenied` for others than administrators.
    """
    found: dict[str, Document] = {}
    try:
        for params in asked:
            params = {**params, 'include_docs': True}
            answer = server.request('GET', f'{_PATH}/_all_docs', params, repeat=True, shape=rows(id=maybe(text)))
            found |= {row['id']: row['doc'] for row in answer['rows'] if row.get('doc')}
    except DatabaseMissing:
        return None
    except AccessDenied as exc:
        raise AccessDenied(
            f'{server.address.server}: {describe_user(server.user)} may not read and write replications; name an '
            f'administrator of CouchDB with --admin'
        ) from exc
    return found


def plan(
    server: Client, own: str, databases: Collection[str], wanted: Collection[Document], *, restart: bool = False
) -> Iterator[Step]:
    """Yield the steps after which the replications of region `own` into its `databases` are the `wanted` ones.

    With `restart`, replications that are as wanted are started again, because settings of the server change.

    *Raises* `ConfigurationError` if a replication of another app has the same id, and `AccessDenied`.
    """
    found = stored(server, own)
    yield missing(server, found)
    found = found or {}
    for doc in wanted:
        old = found.get(doc['_id'])
        if old and database_in(old, 'target') not in databases:
            raise ConfigurationError(
                f'{server.address.server}: the replication {doc["_id"]} exists and writes into another database, '
                f'{database_in(old, "target") or "without a name"}: choose another name for the region in the '
                f'transport options region and regions, or delete this document in _replicator'
            )
        goal = f'{doc["_id"]} pulls from {doc["source"]["url"]}'
        yield step(server, goal, doc, old, restart=restart)
    known = {doc['_id'] for doc in wanted}
    for doc_id, old in sorted(found.items()):
        if doc_id not in known and database_in(old, 'target') in databases:
            goal = f'{doc_id}, of a region that is not in the option regions, is removed'
            yield Step(goal, partial(_delete, server, old))


def missing(server: Client, found: dict[str, Document] | None) -> Step:
    """Return the step after which the database `_replicator` exists; `found` is the result of `read`."""
    return Step('the database _replicator exists', partial(_create, server) if found is None else None)


def step(server: Client, goal: str, doc: Document, old: Document | None, *, restart: bool = False) -> Step:
    """Return the step after which a replication is `doc`; `old` is the stored one."""
    done = not restart and old is not None and _is(old, doc)
    return Step(goal, None if done else partial(_put, server, doc, old))


def reached(server: Client, own: str) -> set[str] | None:
    """Return the ids of those replications of region `own` that have reached their source since they were started.

    CouchDB calls a replication running before it has connected, and for a moment also one whose document has changed.
    One that has connected is a task with the settings of its document. None for others than server administrators.
    """
    try:
        docs = stored(server, own) or {}
        tasks = server.request('GET', '/_active_tasks', repeat=True, shape=items(members()))
    except (AccessDenied, DatabaseMissing):  # the latter from the embedded server, which has no tasks
        return None
    return {
        doc_id
        for task in tasks
        if (doc := docs.get(doc_id := str(task.get('doc_id'))))
        and task.get(_NUDGED) == doc.get(_NUDGED, task.get(_NUDGED))
    }


def server_in(source: Any) -> str | None:
    """Return the URL of the server in the source of a replication, or in its URL; None without one."""
    return _url(source).rpartition('/')[0] or None


def nudge(client: Client, own: str, others: Mapping[str, Address]) -> dict[str, str]:
    """Start the replications of region `own` from these other regions again; return the URLs of their sources, by id.

    Of a region with several nodes, a node is chosen that responds. CouchDB waits longer and longer before it tries a
    failed replication again; a changed document is tried at once. `client` is a client for any database on the own
    server, with the rights of a server administrator, or of a member of `_replicator` who is the `owner` of the
    documents.

    *Raises* `ConfigurationError` if a region has no replications here.
    """
    server = server_of(client)
    found = stored(server, own) or {}
    docs, urls = list[Document](), dict[str, str]()
    for other, address in others.items():
        here = [doc_id for kind in ('regions', 'results') if (doc_id := id_of(kind, own, other)) in found]
        if not here:
            raise ConfigurationError(
                f'{server.address.server} has no replications from region {other}: '
                f'run "celery -A your_app couchdb regions setup"'
            )
        node = chosen(address, server_in(found[here[0]].get('source'))) if address.others else None
        docs += [_from(node, found[doc_id]) if node else found[doc_id] for doc_id in here]
    for doc in docs:
        _put(server, doc, doc)
        urls[doc['_id']] = redacted(_url(doc['source']))
    return urls


def _from(node: Address, doc: Document) -> Document:
    """Return a replication from a node, or as it is if that is the node of its source."""
    source = doc['source']
    if server_in(source) == node.server or not isinstance(source, Mapping):
        return doc
    database = unquote(_url(source).rpartition('/')[2])
    return {**doc, 'source': {**source, **endpoint(replace(node, database=database))}}


def _url(source: Any) -> str:
    return str((source.get('url') if isinstance(source, Mapping) else source) or '').rstrip('/')


def _is(old: Document, wanted: Document) -> bool:
    """Tell whether a stored replication is as wanted. One in the state `failed` is not: it is not tried again."""
    return old.get('_replication_state') != 'failed' and all(old.get(name) == value for name, value in wanted.items())


def _put(server: Client, doc: Document, old: Document | None) -> None:
    # Without the state, which CouchDB would keep.
    kept = {name: value for name, value in doc.items() if not name.startswith('_replication') and name != '_rev'}
    if old is not None:
        first, second = _VALUES
        kept |= {'_rev': old['_rev'], _NUDGED: second if old.get(_NUDGED) == first else first}
    server.request('PUT', f'{_PATH}/{quote(doc["_id"], safe="")}', body=kept)


def _delete(server: Client, doc: Document) -> None:
    server.request('DELETE', f'{_PATH}/{quote(doc["_id"], safe="")}', {'rev': doc['_rev']})


def _create(server: Client) -> None:
    try:
        server.request('PUT', _PATH)
    except Conflict:
        pass  # an earlier step for another device has created it


def database_in(doc: Mapping[str, Any], member: str) -> str:
    """Return the name of the database that is the `source` or the `target` of a replication."""
    return unquote(_url(doc.get(member)).rpartition('/')[2])


# -- nodes of other regions


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
    client = Client(node.root, _NODE_SECONDS, _NODE_SECONDS)
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


# -- the replicator


class Replicator:
    """The replicator of a server, with the rights of a server administrator. *Raises* `AccessDenied` without them."""

    def __init__(self, server: Client) -> None:
        """Read the settings of all nodes; `server` is a client for the server, see `Address.root`.

        *Raises* `ConfigurationError` for the embedded server.
        """
        self._server = server
        if 'couchdb' not in server.welcome():
            raise ConfigurationError(
                f'{server.address.server} is the embedded server, which has no replicator that reaches other servers: '
                f'regions need Apache CouchDB'
            )
        try:
            names = server.request('GET', '/_membership', repeat=True, shape=members(cluster_nodes=items(text)))
            self.settings = {name: self._read(name, 'replicator') for name in sorted(names['cluster_nodes'])}
            self._listening = [self._read(name, 'chttpd') for name in self.settings]
        except AccessDenied as exc:
            raise AccessDenied(
                f'{server.address.server}: {describe_user(server.user)} may not read and change the settings of the '
                f'replicator; name an administrator of CouchDB with --admin'
            ) from exc

    def own_url(self) -> str:
        """Return the URL at which each node reaches itself, or that of the app if nodes differ.

        A node listens without TLS on its loopback interface, unless its configuration says otherwise. So replications
        do not depend on the way on which workers reach the server, such as a proxy or a name.
        """
        urls = {
            f'http://{_LOOPBACK[host]}:{node.get("port", "5984")}'
            if (host := node.get('bind_address', '127.0.0.1')) in _LOOPBACK
            else ''
            for node in self._listening
        }
        [url, *others] = sorted(urls)
        return url if url and not others else self._server.address.server

    def plan(self, *, verify: bool, trusted: str | None) -> Iterator[Step]:
        """Yield the steps that change settings of the nodes.

        With `verify`, certificates are verified. `trusted` is the path of a file with the certificates of CAs, on the
        machines of the nodes; None keeps the setting. *Raises* `ConfigurationError` if replication is switched off, or
        if certificates cannot be verified because no file is known.
        """
        for name, node in self.settings.items():
            if 'http' not in node.get('valid_endpoint_protocols', 'http'):
                raise ConfigurationError(
                    f'{self._server.address.server}: replication is switched off, by the setting '
                    f'"[replicator] valid_endpoint_protocols" of node {name}: set it to "http,https"'
                )
        for setting, value in BOUNDED.items():
            given = {node[setting] for node in self.settings.values() if setting in node}
            if given - {value}:
                text = (
                    f'[replicator] {setting} is {", ".join(sorted(given))} and stays so; with {value}, regions that '
                    f'were cut off catch up within 40 seconds'
                )
                yield Step(text, notice=True)
            else:
                yield self._setting(setting, value)
        if verify:
            if not trusted and not all(_TRUSTED in node for node in self.settings.values()):
                raise ConfigurationError(
                    'other regions are reached by TLS, but CouchDB knows no file with certificates to verify theirs: '
                    'name the file on its machines with --trusted-certificates, for example '
                    '/etc/ssl/certs/ca-certificates.crt, or write ?ssl_cert_reqs=none into the URLs of the regions'
                )
            if trusted:
                yield self._setting(_TRUSTED, trusted)
            yield self._setting(_VERIFY, 'true')

    def _setting(self, setting: str, value: str) -> Step:
        nodes = [name for name, node in self.settings.items() if node.get(setting) != value]
        return Step(
            f'[replicator] {setting} is {value}, for all replications of the server',
            partial(self._write, setting, value, nodes) if nodes else None,
        )

    def _read(self, node: str, section: str) -> Mapping[str, str]:
        found: Mapping[str, str] = self._server.request(
            'GET', f'/_node/{quote(node)}/_config/{section}', repeat=True, shape=members()
        )
        return found

    def _write(self, setting: str, value: str, nodes: list[str]) -> None:
        for node in nodes:
            self._server.request('PUT', f'/_node/{quote(node)}/_config/replicator/{setting}', body=value)
