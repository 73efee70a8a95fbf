"""The leader of a region, and its links: what it does for each other region.

The leader says what the region wants, lends tasks (`lending`), and decides about the tasks that the region gave to
other ones (`home`), in one thread that makes requests to its own server only. A link, in a thread of its own, reads
what one other region has for this one, in that region's database of regions: tasks (`taker`), and what returns
(`outcomes`). An outage of one region therefore delays nothing between the others, and no fallback.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from kombu_couchdb.contrib.regions import records, region
from kombu_couchdb.couchdb.call import HTTPOptions
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.conflicts import delete_current
from kombu_couchdb.errors import AccessDenied, CouchDBError, DatabaseMissing
from kombu_couchdb.leases.leader import Duty, LeaderLease, Led
from kombu_couchdb.log import get_logger
from kombu_couchdb.outage import Outage

from ..parcels.inbox import Inbox
from .home import Home
from .lending import LENT_SECONDS, LOAD_SECONDS, ROOM_SECONDS, Demand, Lender, Looks, loads_of
from .outcomes import ResultsAtHome
from .taker import DELAY_SECONDS, Taker

logger = get_logger(__name__)

#: The time limits of the responses of another region and of connecting to it, in seconds.
_HTTP = HTTPOptions(8.0, 3.0)

#: The pause after another region refused the user or the password, in seconds. CouchDB locks a user after five wrong
#: passwords in a short time.
_DENIED_SECONDS = 120.0

#: The documents that are processed together.
_TURN_DOCS = 100

#: The interval at which a link looks whether its process leads, in seconds. This takes no request.
_LOOK_SECONDS = 1.0


class SharedLead:
    """The lead of the region, and what its links know. It has the members of `LeaderLease` that a duty uses."""

    renewal = next_in = _LOOK_SECONDS

    def __init__(self, lease: LeaderLease, wake: Callable[[], None]) -> None:
        """`wake()` wakes the leader of the region."""
        self._lease, self._wake = lease, wake
        #: Whether the leader of the region has not seen yet what links have noted.
        self.has_news = False
        #: Why other regions cannot be read, by region.
        self.errors: dict[str, str] = {}
        #: How many tasks of each queue other regions want, and the monotonic time until which they do.
        self.wants: dict[str, tuple[dict[str, int], float]] = {}
        #: By region and queue: the tasks that it has lent to this one, and how many of those have ended.
        self.lent: dict[str, Counter[str]] = {}
        self.done: dict[str, Counter[str]] = {}

    @property
    def term(self) -> int | None:
        """The number of the term in which this process leads; None if it does not."""
        return self._lease.term

    def tell(self) -> None:
        """Let the leader of the region see what a link has noted; any thread may call this."""
        self.has_news = True
        self._wake()

    def step(self) -> int | None:
        """Return `term`."""
        return self.term

    def release(self) -> None:
        """Do nothing: the leader of the region releases the lead."""


class RegionLeader(Duty):
    """Leads a region, and lets the links of this process work. Use it in one thread.

    *Every* method raises the errors of `kombu_couchdb.errors`.
    """

    process = 'this worker'

    def __init__(self, app: Any, transport: Any, wake: Callable[[], None], concurrency: int) -> None:
        """Use the connected `transport`. The worker runs up to `concurrency` tasks at once."""
        options, broker = transport.options, transport.couchdb
        own = options.region
        super().__init__(LeaderLease(broker, f'region:{own}'))
        self._app, self._name, self._others = app, own, sorted({*options.regions} - {own})
        self._broker, self._concurrency = broker, concurrency
        self._lead, self._links = SharedLead(self._leader, wake), list[Led]()
        self._client = broker.beside(region.database(options.regions, own))
        self._looks, self._demand = Looks(broker, wake), Demand(self._client, own)
        self._home = Home(app, transport, self._client, wake)
        content = app.conf.accept_content
        self._lender = Lender(broker, self._client, own, options.lend_after, content, self._home.note_lent)

    def begin(self) -> None:
        """Forget what a former term knew, and start the links, unless they run."""
        logger.info('this worker leads region %s from now on', self._name)
        self._client.info()  # it raises if the region is not set up
        for part in (self._home, self._looks, self._demand, self._lender):
            part.reset()
        for other in self._others if not self._links else ():
            failed = f'tasks and results of region {other} wait'
            again = f'tasks and results of region {other} are processed again'
            connection = self._app.connection_for_write()
            link = Led(connection, partial(self._link, other), failed, again, setup='regions setup')
            link.start(f'celery-couchdb-region-{other}')
            self._links.append(link)

    def _link(self, other: str, connection: Any, wake: Callable[[], None]) -> Link:
        return Link(self._app, connection.connection, wake, self._lead, other)

    def rest(self) -> float:
        """Follow nothing."""
        self._looks.reset()
        self._home.reset()
        return super().rest()

    def work(self, *, stale: bool) -> float:
        """Decide about the tasks that were given away, say what the region wants, and lend."""
        self._home.step()
        for other in self._home.silent:
            self._lead.wants.pop(other, None)  # until it writes again that it wants some
        self._home.silent.clear()
        self._lender.finish()
        if self._lead.has_news or (self._home.has_room and self._wants):
            self._looks.soon(ROOM_SECONDS)
        self._lead.has_news = self._home.has_room = False
        if self._looks.begin(min(LENT_SECONDS, self._lender.lend_after)):
            self._look()
        return min(self._home.next_at, self._looks.next_at) - time.monotonic()

    @property
    def _wants(self) -> dict[str, dict[str, int]]:
        """What other regions want now, with what they have."""
        now = time.monotonic()
        return {other: want for other, (want, until) in self._lead.wants.copy().items() if want and until > now}

    def _look(self) -> None:
        loads, lent = loads_of(self._broker, self._concurrency), self._home.lent
        here, done = (sum(found.copy().values(), Counter()) for found in (self._lead.lent, self._lead.done))
        self._demand.update(loads, here, done, dict(self._lead.errors))
        wants = self._wants
        for other, want in wants.items():
            self._lender.lend(other, {queue: count - lent[other, queue] for queue, count in want.items()}, loads)
        self._home.cancel_revoked()
        is_lending = bool(
            here or any(load.waiting and any(queue in want for want in wants.values()) for queue, load in loads.items())
        )
        found = is_lending or bool(lent) or any(load.waiting or load.claimed for load in loads.values())
        self._looks.end(LENT_SECONDS if is_lending else LOAD_SECONDS, found=found)

    def close(self) -> None:
        """Say that the region wants nothing, if it leads, stop the links, and release the lead to another process."""
        if self._leader.leads:
            try:
                self._demand.close(self._lead.errors)
            except CouchDBError as exc:
                logger.debug('region %s still wants tasks: %s', self._name, exc)
        for link in self._links:
            link.end()
        for link in self._links:  # this takes seconds if a region does not respond
            link.stop()
        self._looks.close()
        self._home.close()
        super().close()
        self._client.close()


class Link(Duty):
    """Takes tasks and results of another region. Use it in one thread.

    *Every* method raises the errors of `kombu_couchdb.errors`, but an outage of the other region is no error.
    """

    process = 'this worker'

    def __init__(self, app: Any, transport: Any, wake: Callable[[], None], lead: SharedLead, other: str) -> None:
        """Use the connected `transport`. Another thread calls `wake()` when there is something to do."""
        super().__init__(lead)  # type: ignore[arg-type]  # it has the members that a duty uses
        options, own = transport.options, transport.options.region
        self._name, self._other, self._lead, self._foreign = own, other, lead, options.regions.keys() - {other}
        address = region.addresses(options, app.conf.broker_use_ssl)[other]
        self._own = transport.couchdb.beside(region.database(options.regions, own))
        self._there = Client(address, _HTTP)
        prefixes = region.results_to(own), region.records_to(own), region.region_id('')
        self._arriving = Inbox(self._there, wake, *prefixes, docs=True)
        self._taker = Taker(app, transport, self._own, self._arriving, own, other)
        self._results = ResultsAtHome(app, self._own)
        self._outage = Outage(
            logger, f'region {other} cannot be read just now: %s', f'region {other} can be read again'
        )
        #: The documents with results that this region has refused.
        self._refused = set[str]()

    def begin(self) -> None:
        """Forget what a former term knew."""
        self._arriving.reset()
        self._taker.reset()
        self._refused.clear()

    def rest(self) -> float:
        """Follow nothing."""
        self.begin()
        return super().rest()

    def work(self, *, stale: bool) -> float:
        """Do what is due in the other region's database."""
        if time.monotonic() < self._outage.until:
            return self._outage.until - time.monotonic()
        try:
            self._taker.look()
            self._process(self._arriving.take(_TURN_DOCS))
        except Exception as exc:
            self._arriving.repeat()
            if isinstance(exc, CouchDBError):
                return self._blame(exc)
            raise
        self._outage.recovered()
        self._note_problems()
        self._lead.lent[self._other], self._lead.done[self._other] = self._taker.lent, self._taker.done.copy()
        return min(self._arriving.next_at, self._taker.next_at) - time.monotonic()

    def close(self) -> None:
        """Close the connections."""
        self._arriving.close()
        self._there.close()
        self._own.close()

    def _blame(self, error: CouchDBError) -> float:
        """Note that the other region fails, and return the seconds to pause; *raises* the error if this one does."""
        try:
            self._there.sequence()
        except CouchDBError as exc:
            if isinstance(exc, DatabaseMissing):
                self.begin()
            self._lead.wants.pop(self._other, None)
            self._arriving.put_back([region.region_id(self._other)])
            text = records.without_remedy(exc)
            self._note_error(text)
            return self._outage.failed(exc, text, least=_DENIED_SECONDS if isinstance(exc, AccessDenied) else 0.0)
        raise error

    def _note_problems(self) -> None:
        """Note what is wrong although the other region can be read."""
        text = None
        if self._refused:
            text = f'this region refuses its results: {self._results.problem}'
        elif self._taker.foreign:
            text = f'another server is called region {self._name}, too, and has taken tasks: rename one of them'
        if text and text != self._lead.errors.get(self._other):
            logger.warning('tasks of region %s wait: %s', self._other, text)
        self._note_error(text)

    def _note_error(self, text: str | None) -> None:
        if text == self._lead.errors.get(self._other):
            return
        if text:
            self._lead.errors[self._other] = text
        else:
            self._lead.errors.pop(self._other)
        self._lead.tell()

    def _process(self, changed: dict[str, Document | None]) -> None:
        docs = [doc for doc in changed.values() if doc]
        self._taker.ended(doc_id for doc_id, doc in changed.items() if doc is None)
        if results := [doc for doc in docs if doc['_id'].startswith(region.results_to(self._name))]:
            taken = self._results.take(results, self._other, self._foreign)
            left = {doc['_id'] for doc in results} - {doc['_id'] for doc in taken}
            self._refused -= {doc['_id'] for doc in taken}
            self._refused |= left
            self._arriving.put_back({*left, *delete_current(self._there, taken)}, DELAY_SECONDS)
        self._taker.take([doc for doc in docs if doc['_id'].startswith(region.records_to(self._name))])
        if (name := region.region_id(self._other)) in changed:
            want, seconds = region.wants_of(changed[name] or {}, self._there.clock.now())
            before, _ = self._lead.wants.get(self._other, ({}, 0.0))
            self._lead.wants[self._other] = want, time.monotonic() + seconds
            if want != before:  # it is not only renewed
                self._lead.tell()


def loop(app: Any, concurrency: int) -> Led:
    """Return the loop of a worker that leads a region, if no other worker does; it runs up to `concurrency` tasks."""
    own = app.conf.broker_transport_options['region']
    return Led(
        app.connection_for_write(),
        lambda connection, wake: RegionLeader(app, connection.connection, wake, concurrency),
        f'region {own} has no leader',
        f'region {own} can have a leader again',
        setup='regions setup',
    )
