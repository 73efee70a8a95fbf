"""The other regions: their addresses, the replications from them, and what is on its way to them and from them.

Durations are seconds. The numbers come from several requests, one after the other, while workers run.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypedDict
from urllib.parse import quote

from ..couchdb.address import Address, parse_list
from ..couchdb.client import Client, Document
from ..couchdb.shapes import exactly, items, maybe, members, number, text
from ..errors import AccessDenied, CouchDBError, DatabaseMissing, NotFound
from ..options import Options
from ..parcels.replications import id_of, replication, server_of
from .region import REGIONS, region_id

#: The shapes of the rows of the view `traffic`, reduced and not.
_COUNT = members(value=number)
_ROW = members(key=exactly(number, text, text, number))

_DOCS = '/_scheduler/docs/_replicator'

#: A parcel that is not here so many seconds after it was seen in the other region is missing, and how many are looked
#: for. Without an outage, 99 of 100 parcels travel for less than half a second.
_HOP_SECONDS, _MAX_PARCELS = 2.0, 1000


class RegionTraffic(TypedDict):
    """The parcels of one kind between two regions."""

    count: int
    #: The age of the oldest, since it was published or refused; None without parcels that have a date.
    oldest: float | None


class Replication(TypedDict):
    """The state of one replication."""

    #: CouchDB's word, such as `running` or `crashing`; `starting` if it is running, but has not reached the other
    #: region since it was started; `missing` without a document; None if the rights do not suffice.
    state: str | None
    #: The error of the last attempt, if it failed.
    error: str | None
    #: When the state was reached, as CouchDB writes a time.
    since: str | None
    #: The URL of the database from which it pulls; None if unknown.
    source: str | None


class RegionStatus(TypedDict):
    """What the own server knows of another region."""

    #: By kind, `regions` or `results`.
    replications: dict[str, Replication]
    #: Parcels to the region; also those that it has published and whose deletion has not returned.
    leaving: RegionTraffic
    #: Parcels from the region that are here and not published yet.
    arrived: RegionTraffic
    #: Parcels from or to the region that the other side has refused.
    refused: RegionTraffic
    #: Up to which change of the other region's database the parcels are here; None if unknown.
    through: Any


class Remote(TypedDict):
    """What the server of another region knows."""

    #: The duration of a request.
    response: float
    #: Parcels on their way from the region; those that have arrived here, too, until their deletion has returned.
    leaving: RegionTraffic
    #: The number of changes in its database that the replication has not looked at; None if unknown.
    pending: int | None
    #: The number of parcels from the region that were still not here after two seconds. Only 1,000 are looked for.
    missing: int


def pulled_parcels(own: str, other: str, source: Document, target: Document) -> Document:
    """Return the replication of the parcels between two regions, and of the document of the other region.

    The selector names ids, because a deleted document has no other member.
    """
    between = f'{own}:{other}|{other}:{own}'
    selector = {'_id': {'$regex': f'^(p:({between}):|{region_id(other)}$)'}}
    return replication(id_of('regions', own, other), source, target, selector)


def pulled_results(own: str, other: str, source: Document, target: Document) -> Document:
    """Return the replication of the results that return from region `other`. Their deletions do not travel."""
    # While a region is renamed, its two names have one database of results. CouchDB gives up a replication that it
    # cannot distinguish from another one, and a header is one of the members that it compares.
    source = {**source, 'headers': {'X-Celery-Region': other}}
    return replication(id_of('results', own, other), source, target, {'to': own})


def addresses(options: Options, tls: Any = None) -> dict[str, Address]:
    """Return the addresses of the databases of regions, by region. `tls` is the setting `broker_use_ssl`.

    A URL without a user gets the user of the option `credentials`.
    """
    found = {}
    for name, url in (options.regions or {}).items():
        setting = f'transport option regions, region {name}'
        given = {'tls': tls} if url.lower().startswith('couchdbs:') else {}
        address = parse_list(url.split(';'), setting, 'celery', auth='basic', **given)
        if options.credentials and not address.user:
            others = tuple(replace(other, credentials=options.credentials) for other in address.others)
            address = replace(address, credentials=options.credentials, others=others)
        found[name] = address
    return found


def unready(client: Client, name: str) -> str | None:
    """Read a database of region `name` as the replicator does; return in words what prevents that, or None.

    *Raises* `AccessDenied` for a wrong password. Regions are set up one after the other, and the replicator may reach
    what this machine does not: what else can go wrong is no error.
    """
    server = server_of(client)
    try:
        server.request('GET', '/_session', repeat=True, shape=members())
        client.info()
    except (DatabaseMissing, AccessDenied) as exc:
        if isinstance(exc, AccessDenied) and 'not allowed to access' not in str(exc):
            raise AccessDenied(
                f'region {name} cannot be read: create its user there, or correct its URL in the transport option '
                f'regions ({exc})'
            ) from exc
        return f'region {name} is not set up for this region yet: run "couchdb regions setup" there, too ({exc})'
    except CouchDBError as exc:
        return f'region {name} does not respond to this machine; CouchDB goes on trying ({exc})'
    return None


def region(client: Client, own: str, other: str, kinds: Iterable[str], reached: Collection[str] | None) -> RegionStatus:
    """Return what the own server knows of another region.

    `client` is for the own database of regions; `kinds` are those of the replications; `reached` is the result of
    `replications.reached`. *Raises* `DatabaseMissing`.
    """
    server = server_of(client)
    through, replications = None, {}
    for kind in kinds:
        doc_id = id_of(kind, own, other)
        found, seq = _replication(server, doc_id)
        if found['state'] == 'running' and reached is not None and doc_id not in reached:
            found['state'] = 'starting'
        replications[kind] = found
        through = seq if kind == 'regions' else through
    return {
        'replications': replications,
        'leaving': _parcels(client, 0, other, own),
        'arrived': _parcels(client, 0, own, other),
        'refused': _together(_parcels(client, 1, other, own), _parcels(client, 1, own, other)),
        'through': through,
    }


def remote(client: Client, here: Client, own: str, other: str, through: Any) -> Remote:
    """Return what the server of another region knows; `client` is for that region's database of regions.

    `here` is a client for the own one, and `through` is that of `region`. *Raises* what prevents the requests.
    """
    began = time.monotonic()
    client.info()
    response = time.monotonic() - began
    pending = None
    if through is not None:
        params = {'since': through, 'limit': 1}
        shape = members(results=items(members()), pending=number)
        found = client.request('GET', '/_changes', params, repeat=True, shape=shape)
        pending = int(found['pending']) + len(found['results'])
    leaving = _parcels(client, 0, own, other)
    missing = _missing(client, here, own, other) if leaving['count'] else 0
    return {'response': response, 'leaving': leaving, 'pending': pending, 'missing': missing}


def _missing(client: Client, here: Client, own: str, other: str) -> int:
    """Return how many of the oldest parcels from region `other` do not arrive `here` within two seconds."""
    until = time.monotonic() + _HOP_SECONDS
    keys: dict[str, Any] = {'startkey': [0, own, other], 'endkey': [0, own, other, {}], 'limit': _MAX_PARCELS}
    missing = {row['id'] for row in client.view(REGIONS, 'traffic', members(id=text), reduce=False, **keys)}
    while (missing := missing - here.known(sorted(missing))) and time.monotonic() < until:
        time.sleep(_HOP_SECONDS / 10)
    return len(missing)


def _parcels(client: Client, kind: int, to: str, sender: str) -> RegionTraffic:
    keys: dict[str, Any] = {'startkey': [kind, to, sender], 'endkey': [kind, to, sender, {}]}
    try:
        counted = client.view(REGIONS, 'traffic', _COUNT, **keys)
    except NotFound:
        return {'count': 0, 'oldest': None}
    if not counted:
        return {'count': 0, 'oldest': None}
    keys['startkey'] += [1]  # malformed parcels without a date have 0
    first = client.view(REGIONS, 'traffic', _ROW, reduce=False, limit=1, **keys)
    oldest = max(0.0, client.clock.now() - first[0]['key'][3]) if first else None
    return {'count': int(counted[0]['value']), 'oldest': oldest}


def _together(*parts: RegionTraffic) -> RegionTraffic:
    dates = [part['oldest'] for part in parts if part['oldest'] is not None]
    return {'count': sum(part['count'] for part in parts), 'oldest': max(dates, default=None)}


def _replication(server: Client, doc_id: str) -> tuple[Replication, Any]:
    """Return the state of a replication, and up to which change of the source it has come, if that is known."""
    try:
        found = server.request(
            'GET', f'{_DOCS}/{quote(doc_id, safe="")}', repeat=True, shape=members(state=maybe(text))
        )
    except (NotFound, DatabaseMissing):
        return {'state': 'missing', 'error': None, 'since': None, 'source': None}, None
    except AccessDenied:
        return {'state': None, 'error': None, 'since': None, 'source': None}, None
    info = found.get('info') if isinstance(found.get('info'), Mapping) else {}
    error = info.get('error')
    return (
        {
            'state': found.get('state') or 'initializing',  # null until CouchDB has read a new document
            'error': ' '.join(str(error).split()) if error else None,
            'since': found.get('last_updated'),
            'source': source.rstrip('/') if isinstance(source := found.get('source'), str) else None,
        },
        info.get('through_seq'),
    )
