"""Regions: their names, addresses, documents, and the rules of what becomes of a task that was given away.

A *region* is a CouchDB, one server or a cluster, with a broker's database, workers and results of its own. Each region
has a *database of regions*, in which it puts what it has for the others. Their workers read it there, by HTTP::

    p:<to>:<task id>:<tag>        the *record* of a task that this region gave to the region `to`: a parcel
    r:<home>:<task id>:<tag>      a result that returns to the region `home`, see `returned`, or several `together`
    region:<name>                 what this region says about itself, see `Region`

The record exists from the moment the task is sent until the task has ended. So it says where the task is::

    {"_id": "p:eu:<task id>:<tag>", "type": "Parcel",
     "task": …, "id": …, "exchange": …, "routing_key": …, "published": …, "message": {…},    as in each parcel
     "fallback": "us", "fallback_at": 1763709030.5,   where it runs if `eu` has not taken it by then
     "lent": 1763709000.5,                            when it was lent, if it may run in any region
     "state": "there", "taken": 1763709001.5,         `eu` runs it; without it, it is *sent*
     "by": "1763700000",                              the `identity` of the broker that has taken it
     "state": "withdrawn", "run_in": "us",            home runs it elsewhere ("": nowhere), and deletes the record then
     "cancelled": 1763709002.5,                       home wants it to be removed
     "delayed": "exchange …",                         why `eu` has not taken it yet
     "status": "refused", "reason": …, "failed": …}   `eu` has refused it for good
     "told": true}                                    home has told so whoever waits for the task

Who changes a record replaces its revision, in one database: that of home. So one only can have a task: the region `to`
says `there` before it puts the task into its queue, and home says `withdrawn` before it runs it elsewhere, or cancels
it. Of two servers with the name `to` one only takes it.

A *LentItem* is a message while it is moved from its home to an idle region::

    {"_id": "0000647…", "type": "LentItem", "status": "lent",
     "region": "eu",                   where it will run
     "lent": 1763709001.5,             when
     …}                                the other members are those of the WorkItem that it was

It replaces a WorkItem that no consumer has claimed, by revision: CouchDB accepts this or a claim, never both. It has
another type, so that no view shows it as a message of a queue. When the record is stored, it is deleted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import inf
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from ...couchdb.address import Address, parse_list
from ...couchdb.client import Client
from ...design import load
from ...documents import concurrency, rates, validation, workitem
from ...documents.body import body_stub
from ...documents.ids import JOB_KEY
from ...documents.types import DatedMessage, Document, Stored
from ...errors import ConfigurationError
from ...options import Options, login_options
from ...values import is_number
from ..parcels import parcel
from ..parcels.parcel import FROM_REGION, GIVER, REGION_HEADER, REGION_PROPERTY, Parcel

#: The design document of the broker's database with the view `lendable`, the messages that may be lent to other
#: regions. Its index is updated when it is read.
LENDING = 'celery-lending-v1'

#: The region of a task that may run anywhere: at home, or in a region that has nothing to do.
ANY = 'any'

#: The properties that name the region in which a task runs if its region has not taken it in time, and the time in
#: seconds, and its default.
_FALLBACK, _FALLBACK_AFTER, _FALLBACK_SECONDS = 'fallback', 'fallback_after', 30.0

#: The properties and headers of messages that concern regions.
MEMBERS = frozenset({REGION_PROPERTY, REGION_HEADER, _FALLBACK, _FALLBACK_AFTER})

#: The longest time after which a task runs in another region, in seconds: about 31 years.
_MAX_SECONDS = 1e9

_NAME = re.compile(r'[a-z][a-z0-9-]{0,29}\Z')


#: The source of all records, see `parcel.moved_id`. It does not name the region that gave the task away: a task is
#: stored once, even if that region is renamed while the task is in another one.
SOURCE = 'records of regions'

#: A task that was lent is taken back if its region has not taken it after so many seconds.
LEND_SECONDS = 10.0

#: The beginnings of the ids of records, and of results that return.
RECORD, RETURNED = 'p:', 'r:'


class Region(Stored, total=False):
    """What a region says about itself, in its database of regions. Its leader writes it when something changes."""

    _id: str
    type: Literal['Region']
    date: float
    #: How many tasks of other regions it would have at the same time, by queue, and until when, by its own clock.
    want: dict[str, int]
    until: float
    #: By region: why that region cannot be read from here. Those that can be read are left out.
    errors: dict[str, str]


class Giver(NamedTuple):
    """The value of the header `GIVER`: how a result gets back to the region that gave the task away."""

    #: The region that has taken the task, and its database of regions.
    own: str
    database: str
    #: The region that gave it away, the id of the task, and the id of the record there.
    region: str
    task_id: str
    record: str

    @classmethod
    def of(cls, headers: Mapping[str, Any]) -> Giver | None:
        """Read the header of a message; None without a valid one."""
        found = headers.get(GIVER)
        if not isinstance(found, (list, tuple)) or len(found) != len(cls._fields):
            return None
        return cls(*found) if all(isinstance(part, str) for part in found) else None


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


def addresses(options: Options, tls: Any = None) -> dict[str, Address]:
    """Return the addresses of the databases of regions, by region. `tls` is the setting `broker_use_ssl`.

    A URL without user and password gets those of the option `credentials`, and they are sent as `auth` says, but never
    in a session. `login_method` in the URL takes precedence.
    """
    found, shared = {}, {**login_options(options), 'credentials': None, 'auth': 'basic'}
    kind = options.auth if options.auth not in (None, 'cookie') else 'basic'
    for name, url in (options.regions or {}).items():
        setting = f'transport option regions, region {name}'
        given = {'tls': tls} if url.lower().startswith('couchdbs:') else {}
        address = parse_list(url.split(';'), setting, 'celery', **shared, **given)
        if options.credentials and not (address.user or address.password):
            given = {'credentials': options.credentials, 'auth': kind if address.auth == 'basic' else address.auth}
            others = tuple(replace(other, **given) for other in address.others)
            address = replace(address, **given, others=others)
        found[name] = address
    return found


# -- documents


def record_id(to: str, task_id: str, tag: str = '') -> str:
    """Return the id of a record; without `tag`, the beginning of the ids of a task's records."""
    return f'{RECORD}{to}:{task_id}:{tag.replace(":", "-")}'  # so the tag is what follows the last colon


def records_to(name: str) -> str:
    """Return the beginning of the ids of all records of tasks for a region."""
    return f'{RECORD}{name}:'


def results_to(name: str) -> str:
    """Return the beginning of the ids of all results that return to a region."""
    return f'{RETURNED}{name}:'


def region_of(doc_id: str) -> str:
    """Return the region that an id names: for which a record or a result is, or whose document it is."""
    return doc_id.split(':')[1]


def task_id_of(doc_id: str) -> str:
    """Return the id of the task that the id of a record names."""
    return doc_id.partition(':')[2].partition(':')[2].rpartition(':')[0]


def region_id(name: str) -> str:
    """Return the id of the document of a region."""
    return f'region:{name}'


def returned(home: str, task_id: str, tag: str, result: Mapping[str, Any], record: str | None, now: float) -> Document:
    """Return the document that brings a result to the region `home`.

    `result` is the document of the result; its status is `IGNORED` if the task has ended and has none. `record` is the
    id of the record at home, if it has one. `tag` makes the id unique: a task may have several results, one for each
    state.
    """
    doc: Document = {
        '_id': f'{RETURNED}{home}:{task_id}:{tag}',
        'type': 'Returned',
        'date': now,
        'result': {name: value for name, value in result.items() if name not in ('_rev', 'expires')},
    }
    return {**doc, 'record': record} if record else doc


def results_in(doc: Mapping[str, Any]) -> list[Document]:
    """Return the documents of the results in one that has returned: itself, or several that were stored together."""
    together = doc.get('together')
    return [one for one in together if isinstance(one, dict)] if isinstance(together, list) else [dict(doc)]


def wants_of(doc: Mapping[str, Any], now: float) -> tuple[dict[str, int], float]:
    """Return how many tasks of each queue a region wants, and for how many seconds; `now` is by that region's clock.

    Malformed members of its document are ignored.
    """
    want, until = doc.get('want'), doc.get('until')
    if not isinstance(want, dict) or not is_number(until):
        return {}, 0.0
    return {queue: count for queue, count in want.items() if isinstance(count, int) and count > 0}, until - now


def identity(broker: Client) -> str:
    """Return what distinguishes a broker's database from one of the same name on another server: when it was created.

    '' on the embedded server, which only knows when it was started. One request.
    """
    info = broker.info()
    return str(info.get('instance_start_time')) if 'cluster' in info else ''


# -- rules of records

#: What `state_of` returns.
STATES = ('sent', 'there', 'withdrawn', 'refused')


def state_of(doc: Mapping[str, Any]) -> str:
    """Return where the task of a record is, one of `STATES`."""
    return 'refused' if doc.get('status') else found if (found := doc.get('state')) in STATES[1:3] else 'sent'


def is_takeable(doc: Mapping[str, Any], by: str) -> bool:
    """Tell whether the server `by` of its region may put the task of a record into a queue."""
    return is_taken_by(doc, by) or (state_of(doc) == 'sent' and 'cancelled' not in doc)


def is_taken_by(doc: Mapping[str, Any], by: str) -> bool:
    """Tell whether the server `by` has taken the task of a record."""
    return state_of(doc) == 'there' and doc.get('by', by) == by


def there(doc: Mapping[str, Any], by: str, now: float) -> Document:
    """Return the record of a task that the server `by` of its region takes."""
    kept = {name: value for name, value in doc.items() if name != 'delayed'}
    return {**kept, 'state': 'there', 'taken': now, 'by': by}


def order(to: str, task_id: str, what: Literal['cancel', 'retry'], now: float) -> Document:
    """Return the record, without a message, by which region `to` is to revoke or retry a task that is there already.

    It is a later step of a chain, or has failed there. The region deletes the record then.
    """
    return {'_id': record_id(to, task_id, what), 'type': 'Parcel', 'id': task_id, 'state': 'there', 'taken': now}


def is_order(doc: Mapping[str, Any]) -> bool:
    """Tell whether a record is one of `order`."""
    return 'message' not in doc and doc['_id'].endswith((':cancel', ':retry'))


def withdrawn(doc: Mapping[str, Any], run_in: str) -> Document:
    """Return the record of a task that runs in another region than that to which it was given; '': in none."""
    kept = {name: value for name, value in doc.items() if name not in ('status', 'reason', 'failed', 'delayed')}
    return {**kept, 'state': 'withdrawn', 'run_in': run_in}


class HomeDecision(NamedTuple):
    """What home does about a record."""

    #: `run` the task in the region `where`; it has `failed`, with the reason; it is `cancelled`, and never runs.
    what: Literal['run', 'failed', 'cancelled']
    where: str = ''
    reason: str = ''


def decide(doc: Mapping[str, Any], own: str, now: float) -> HomeDecision | None:
    """Return what the region `own` does about its record; None if it waits. `now` is the time of its own server."""
    state, fallback, run_in = state_of(doc), doc.get('fallback'), doc.get('run_in')
    if state == 'withdrawn':
        return HomeDecision('run', str(run_in)) if run_in else HomeDecision('cancelled')
    if state == 'refused':
        if isinstance(fallback, str) and run_in is None:
            return HomeDecision('run', fallback)
        if 'lent' in doc and run_in is None:
            return HomeDecision('run', own)
        where = region_of(doc['_id']) if run_in is None else run_in
        return HomeDecision('failed', reason=f'region {where} has refused the task: {doc.get("reason")}')
    if state == 'there' or (due := due_at(doc)) is None or now < due:
        return None
    if 'cancelled' in doc:
        return HomeDecision('cancelled')
    return HomeDecision('run', str(fallback or own))


def due_at(doc: Mapping[str, Any]) -> float | None:
    """Return when home decides about a record whose task was not taken; None if it waits for its region."""
    if state_of(doc) not in ('sent', 'withdrawn'):
        return None
    if 'cancelled' in doc or state_of(doc) == 'withdrawn':
        return 0.0
    at, seconds = (doc.get('fallback_at'), 0.0) if 'fallback' in doc else (doc.get('lent', inf), LEND_SECONDS)
    return None if at == inf else at + seconds if is_number(at) else 0.0


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
        and validation.malformed_reason(doc) is None
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


def not_lent(doc: Mapping[str, Any]) -> Document:
    """Return the WorkItem that a LentItem was. Its message names no region any more, so no leader lends it again."""
    message = route(doc['message'])[1]
    kept = {name: value for name, value in doc.items() if name not in ('status', 'region', 'lent')}
    return {**kept, 'type': 'WorkItem', 'message': message}


def lent_parcel(doc: Mapping[str, Any], own: str, to: str, body: bytes | None, now: float) -> Parcel:
    """Return the record of an item that region `own` lends to region `to`.

    `body` is the attached body, or None. *Raises* `ValueError` if the body is not text although the message says so.
    """
    message: Any = route(doc['message'])[1]
    message['headers'].setdefault(FROM_REGION, own)
    if isinstance(expires := doc.get('expires'), (int, float)):
        message['properties']['expiration'] = str(max(0, int((expires - now) * 1000)))
    found = parcel.with_body(message, body) if body_stub(doc) else message
    return {
        **parcel.new(found, '', doc['queue'], doc['published']),
        '_id': record_id(to, message['headers']['id'], doc['_id']),
        'lent': now,
    }


# -- views


def lending_document() -> dict[str, Any]:
    """Return the design document `LENDING`, without a revision."""
    return {**load(__package__, LENDING, {'lendable': ''}), 'autoupdate': False}
