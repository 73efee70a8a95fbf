"""Regions: their names, documents and views.

A *region* is a CouchDB, one server or a cluster, with a broker's database, workers and results of its own. Regions that
work for each other replicate their databases of regions, and nothing else of the broker::

    p:<to>:<from>:<tag>    a parcel, a message on its way; `from` creates it, then only `to` changes it, see `parcel`
    region:<name>          the Region document, which only this region writes

So each document has one writer at a time, and an id says between which regions it is replicated.

A *LentItem* is a message while it is moved from its home to an idle region::

    {"_id": "0000647…", "type": "LentItem", "status": "lent",
     "region": "eu",                   where it will run
     "lent": 1763709001.5,             when
     …}                                the other members are those of the WorkItem that it was

It replaces a WorkItem that no consumer has claimed, by revision: CouchDB accepts this or a claim, never both. It has
another type, so that no view shows it as a message of a queue. When the parcel with the message is stored, it is
deleted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from ..design import load
from ..documents import concurrency, rates, validation, workitem
from ..documents.body import stub
from ..documents.ids import JOB_KEY
from ..documents.types import DatedMessage, Document, Stored
from ..errors import ConfigurationError
from ..parcels import parcel
from ..parcels.parcel import FROM_REGION, REGION_HEADER, REGION_PROPERTY, Parcel
from ..values import is_number

#: The design document of a database of regions.
REGIONS = 'celery-regions-v1'

#: The design document of the broker's database with the view `lendable`, the messages that may be lent to other
#: regions. Its index is updated when it is read.
LENDING = 'celery-lending-v1'

#: The region of a task that may run anywhere: at home, or in a region that has nothing to do.
ANY = 'any'

#: The properties that name the region in which a task runs if its region has not taken it in time, and the time in
#: seconds, and its default.
_FALLBACK, _FALLBACK_AFTER, _FALLBACK_SECONDS = 'fallback', 'fallback_after', 30.0

#: The longest time after which a task runs in another region, in seconds: about 31 years.
_MAX_SECONDS = 1e9

_NAME = re.compile(r'[a-z][a-z0-9-]{0,29}\Z')


class Region(Stored):
    """The tasks that a region would run for other regions. It is in the database of regions."""

    _id: str
    type: Literal['Region']
    date: float
    #: The number of tasks, by queue.
    want: dict[str, int]


def check_name(name: str, value: Any) -> str:
    """Return the name of a region; *raises* `ConfigurationError`, which names the option `name`, if it is not one."""
    if not isinstance(value, str) or not _NAME.match(value) or value == ANY:
        raise ConfigurationError(
            f'transport option {name} must have names of regions (a lower-case letter, then up to 29 lower-case '
            f'letters, digits and hyphens; not "{ANY}"), not {value!r:.80}'
        )
    return value


def check_regions(name: str, value: Any) -> dict[str, str]:
    """Return a mapping from names of regions to URLs of their databases of regions.

    *Raises* `ConfigurationError`, which mentions the option `name`, but no value: a URL may contain a password.
    """
    if not isinstance(value, Mapping) or not value:
        raise ConfigurationError(f'transport option {name} must map the names of regions to URLs')
    for region, url in value.items():
        check_name(name, region)
        if not isinstance(url, str) or not url.lower().startswith(('couchdb://', 'couchdbs://')):
            raise ConfigurationError(
                f'transport option {name} must have a URL couchdb://…/database or couchdbs://…/database '
                f'for region {region!r}'
            )
    return dict(value)


def database(regions: Mapping[str, str], name: str) -> str:
    """Return the name of a region's database of regions; the URLs of the nodes of a cluster name the same database."""
    return unquote(urlsplit(regions[name].split(';')[0]).path.strip('/'))


def route(message: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Return the region that a message names, or None, and a copy of the message that names none.

    Programs that cannot set properties, such as those without Celery, use a header.
    """
    region = named(message['properties'], message.get('headers'))
    if region is None:
        return None, dict(message)
    properties, headers = dict(message['properties']), dict(message.get('headers') or {})
    for name in (REGION_PROPERTY, _FALLBACK, _FALLBACK_AFTER):
        properties.pop(name, None)
    headers.pop(REGION_HEADER, None)
    return region, {**message, 'properties': properties, 'headers': headers}


def named(properties: Mapping[str, Any], headers: Mapping[str, Any] | None) -> Any:
    """Return the region that the properties or the headers of a message name; None if they name none."""
    return properties.get(REGION_PROPERTY) or (headers or {}).get(REGION_HEADER)


def fallback(properties: Mapping[str, Any], name: str | None, regions: Collection[str]) -> tuple[str, float] | None:
    """Return the region in which a task for the region `name` runs if that has not taken it, and after how long.

    None if the message names none. The time is in seconds. *Raises* `ConfigurationError` for a wrong value.
    """
    other, seconds = properties.get(_FALLBACK), properties.get(_FALLBACK_AFTER)
    if other is None and seconds is None:
        return None
    if name is None or name == ANY:
        raise ConfigurationError('fallback needs the name of a region in region')
    if not isinstance(other, str) or other not in regions or other == name:
        raise ConfigurationError(f'fallback must be another one of the regions, not {other!r:.80}')
    seconds = _FALLBACK_SECONDS if seconds is None else seconds
    if not is_number(seconds) or not 0 < seconds <= _MAX_SECONDS:
        raise ConfigurationError(f'fallback_after must be a number of seconds above 0, not {seconds!r:.80}')
    return other, float(seconds)


def parcel_id(to: str, own: str, tag: str) -> str:
    """Return the id of a parcel from region `own` to region `to`; `tag` is the id of its message."""
    return f'p:{to}:{own}:{tag}'


def arriving(own: str) -> str:
    """Return the beginning of the ids of all parcels to region `own`."""
    return f'p:{own}:'


def region_id(name: str) -> str:
    """Return the id of the document of a region."""
    return f'region:{name}'


def new(name: str, want: Mapping[str, int], now: float) -> Region:
    """Return the document of a region that wants this many tasks of each queue."""
    return {'_id': region_id(name), 'type': 'Region', 'date': now, 'want': dict(want)}


def wants_of(doc: Mapping[str, Any]) -> dict[str, int]:
    """Return how many tasks of each queue a region wants; malformed members of its document are ignored."""
    want = doc.get('want')
    return {
        queue: count
        for queue, count in (want.items() if isinstance(want, dict) else ())
        if isinstance(count, int) and count > 0
    }


def origin(headers: Mapping[str, Any], own: str | None) -> str | None:
    """Return the region to which a result is returned, or None if the task was sent in this region, `own`."""
    home = headers.get(FROM_REGION)
    return home if own and isinstance(home, str) and _NAME.match(home) and home != own else None


# -- messages that are lent


class LentItem(DatedMessage, Stored):
    """A message that is moved to another region."""

    _id: str
    type: Literal['LentItem']
    status: Literal['lent']
    queue: str
    attempts: int
    claimed: None
    #: The region to which it is moved, and when that began.
    region: str
    lent: float


def may_be_lent(headers: Mapping[str, Any]) -> bool:
    """Tell whether a message with these headers may run in another region: keys of jobs, limits and rates may not."""
    return not {JOB_KEY, concurrency.CONCURRENCY_KEY, rates.RATE_KEY} & {
        name for name, value in headers.items() if value is not None
    }


def is_lendable(doc: Mapping[str, Any], before: float) -> bool:
    """Tell whether an item may be lent: it may run in any region, and is ready since the time `before` at least.

    An item that was delivered before stays at home, where its deliveries are counted.
    """
    return (
        doc.get('type') == 'WorkItem'
        and validation.flaw(doc) is None
        and workitem.is_waiting(doc)
        and not doc.get('parked')
        and not doc['attempts']
        and 'key' not in doc
        and doc['message']['properties'].get('region') == ANY
        and workitem.ready_since(doc) <= before
    )


def lent(doc: Mapping[str, Any], to: str, now: float) -> Document:
    """Return the document that replaces an item that is lent to the region `to`."""
    return {**doc, 'type': 'LentItem', 'status': 'lent', 'region': to, 'lent': now}


def returned(doc: Mapping[str, Any]) -> Document:
    """Return the WorkItem that a LentItem was. Its message names no region any more, so no leader lends it again."""
    message = route(doc['message'])[1]
    kept = {name: value for name, value in doc.items() if name not in ('status', 'region', 'lent')}
    return {**kept, 'type': 'WorkItem', 'message': message}


def lent_parcel(doc: Mapping[str, Any], own: str, to: str, body: bytes | None, now: float) -> Parcel:
    """Return the parcel from region `own` to region `to` with the message of an item.

    `body` is the attached body, or None. *Raises* `ValueError` if the body is not text although the message says so.
    """
    message: Any = route(doc['message'])[1]
    message['headers'].setdefault(FROM_REGION, own)
    if isinstance(expires := doc.get('expires'), (int, float)):
        message['properties']['expiration'] = str(max(0, int((expires - now) * 1000)))
    found = parcel.with_body(message, body) if stub(doc) else message
    return {
        **parcel.new(found, '', doc['queue'], doc['published']),
        '_id': parcel_id(to, own, doc['_id']),
        'lent': True,
    }


# -- views


def design_document() -> dict[str, Any]:
    """Return the design document of a database of regions, without a revision."""
    return load(__package__, REGIONS, {'traffic': '_count', 'fallbacks': ''})


def lending_document() -> dict[str, Any]:
    """Return the design document `LENDING`, without a revision."""
    return {**load(__package__, LENDING, {'lendable': ''}), 'autoupdate': False}
