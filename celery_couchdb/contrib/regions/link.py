"""Links: what the leader of a region does for each other region, in two threads.

A link reads what the other region has for this one, in that region's database of regions: tasks (`taker`), and results
that return (`home`). It lends it tasks (`lending`). The other thread decides about the tasks that this region gave to
the other one (`home`). An outage of one region therefore delays nothing between the others, and no fallback.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from kombu_couchdb.contrib.regions import records, region
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.conflicts import delete_current
from kombu_couchdb.errors import AccessDenied, CouchDBError
from kombu_couchdb.leases.leader import Duty, LeaderLease, Led
from kombu_couchdb.log import get_logger
from kombu_couchdb.outage import Outage

from ..parcels.inbox import Inbox
from .home import Home
from .lending import Activity, Demand, Lender, Looks
from .outcomes import ResultsAtHome
from .taker import DELAY_SECONDS, Taker

logger = get_logger(__name__)

#: The time limits of connecting to another region and of its responses, in seconds.
_CONNECT_SECONDS, _REQUEST_SECONDS = 3.0, 8.0

#: The pause after another region refused the user or the password, in seconds. CouchDB locks a user after five wrong
#: passwords in a short time.
_DENIED_SECONDS = 120.0

#: The documents that are processed together.
_TURN_DOCS = 100

#: The interval at which a link looks whether its process leads, in seconds. This takes no request.
_LOOK_SECONDS = 1.0


class SharedLead:
    """The lead of the region, as seen by the links of its process. It has the members of `LeaderLease` for a duty."""

    renewal = next_in = _LOOK_SECONDS

    def __init__(self, lease: LeaderLease) -> None:
        self._lease = lease
        #: Why other regions cannot be read, by region.
        self.errors: dict[str, str] = {}
        #: How many tasks other regions have lent to this one since the process was started, by region.
        self.lent = Counter[str]()

    @property
    def term(self) -> int | None:
        """The number of the term in which this process leads; None if it does not."""
        return self._lease.term

    def step(self) -> int | None:
        """Return `term`."""
        return self.term

    def release(self) -> None:
        """Do nothing: the leader of the region releases the lead."""


class RegionLeader(Duty):
    """Leads a region: says what it wants, and lets the links of this process work. Use it in one thread."""

    process = 'this worker'

    def __init__(self, app: Any, transport: Any, wake: Callable[[], None], concurrency: int) -> None:
        """Use the connected `transport`. The worker runs up to `concurrency` tasks at once."""
        own = transport.options.region
        super().__init__(LeaderLease(transport.couchdb, f'region:{own}'))
        self._app, self._name, self._others = app, own, sorted({*transport.options.regions} - {own})
        self._lead, self._links = SharedLead(self._leader), list[Led]()
        self._client = transport.couchdb.beside(region.database(transport.options.regions, own))
        self._activity = Activity(transport.couchdb, wake)
        self._demand = Demand(transport.couchdb, self._client, own, concurrency, Looks(self._activity))

    def begin(self) -> None:
        """Forget what a former term knew, and start the links, unless they run."""
        logger.info('this worker leads region %s from now on', self._name)
        self._demand.reset()
        for other in sorted({*self._others, *records.Records(self._client).regions()}) if not self._links else ():
            self._start(Decisions, other, f'celery-couchdb-records-{other}')
            if other in self._others:
                self._start(Link, other, f'celery-couchdb-region-{other}')

    def _start(self, kind: type[Link | Decisions], other: str, name: str) -> None:
        duty = partial(_duty, kind, self._app, self._lead, other)
        failed = f'tasks and results of region {other} wait'
        again = f'tasks and results of region {other} are processed again'
        led = Led(self._app.connection_for_write(), duty, failed, again, setup='regions setup')
        led.start(name)
        self._links.append(led)

    def rest(self) -> float:
        """Follow nothing."""
        self._activity.pause()
        return super().rest()

    def work(self, *, stale: bool) -> float:
        """Say what the region wants, and which regions it cannot read."""
        if self._activity.take():
            self._demand.note_activity()
        self._demand.note_errors(dict(self._lead.errors))
        self._demand.note_lent(sum(self._lead.lent.copy().values()))
        self._demand.step()
        return self._demand.next_at - time.monotonic()

    def close(self) -> None:
        """Say that the region wants nothing, if it leads, stop the links, and release the lead to another process."""
        if self._leader.leads:
            try:
                self._demand.close()
            except CouchDBError as exc:
                logger.debug('region %s still wants tasks: %s', self._name, exc)
        for led in self._links:
            led.end()
        for led in self._links:  # this takes seconds if a region does not respond
            led.stop()
        self._activity.close()
        super().close()
        self._client.close()


class Link(Duty):
    """Takes tasks and results of another region, and lends it tasks. Use it in one thread.

    *Every* method raises the errors of `kombu_couchdb.errors`, but an outage of the other region is no error.
    """

    process = 'this worker'

    def __init__(self, app: Any, transport: Any, wake: Callable[[], None], lead: SharedLead, other: str) -> None:
        """Use the connected `transport`. Another thread calls `wake()` when there is something to do."""
        super().__init__(lead)  # type: ignore[arg-type]  # it has the members that a duty uses
        options, broker, own = transport.options, transport.couchdb, transport.options.region
        self._name, self._other, self._errors, self._lent = own, other, lead.errors, lead.lent
        address = region.addresses(options, app.conf.broker_use_ssl)[other]
        self._own = broker.beside(region.database(options.regions, own))
        self._there = Client(address, _REQUEST_SECONDS, _CONNECT_SECONDS)
        prefixes = region.results_to(own), region.records_to(own), region.region_id('')
        self._arriving = Inbox(self._there, wake, *prefixes, docs=True)
        self._taker = Taker(app, transport, self._own, self._there, own, other)
        self._results = ResultsAtHome(app, self._own, other)
        self._activity = Activity(broker, wake)
        self._lender = Lender(
            broker, self._own, own, other, options.lend_after, app.conf.accept_content, Looks(self._activity)
        )
        #: When results are read again that this region has refused, as monotonic times, by id.
        self._again: dict[str, float] = {}
        self._refusals = Outage(
            logger, f'results of region {other} wait: %s', f'the results of region {other} are stored again'
        )
        self._outage = Outage(
            logger, f'region {other} cannot be read just now: %s', f'region {other} can be read again'
        )

    def begin(self) -> None:
        """Forget what a former term knew."""
        self._forget()

    def rest(self) -> float:
        """Follow nothing."""
        self._forget()
        self._activity.pause()
        return super().rest()

    def work(self, *, stale: bool) -> float:
        """Do all that is due."""
        if stale:
            self._forget()
        arriving = self._work_there()
        if self._activity.take():
            self._lender.note_activity()
        self._lender.step()
        return min(arriving, self._lender.next_at) - time.monotonic()

    def close(self) -> None:
        """Close the connections."""
        self._activity.close()
        self._arriving.close()
        self._there.close()
        self._own.close()

    def _forget(self) -> None:
        self._again.clear()
        for part in (self._arriving, self._taker, self._lender):
            part.reset()

    def _due_again(self) -> list[str]:
        due = [doc_id for doc_id, at in self._again.items() if at <= time.monotonic()]
        for doc_id in due:
            del self._again[doc_id]
        return due

    def _work_there(self) -> float:
        """Do what is due in the other region's database; return the monotonic time at which to call this again."""
        if time.monotonic() < self._outage.until:
            return self._outage.until
        try:
            self._arriving.put_back([*self._taker.due(), *self._due_again()])
            # Not more at a time: a steady stream must not keep waiting what else is due.
            self._process(self._arriving.take(_TURN_DOCS))
            self._taker.step()
        except CouchDBError as exc:
            self._arriving.reset()
            self._taker.reset()
            self._lender.set_wants(None)
            self._own.sequence()  # it raises if it is this region that does not respond
            self._errors[self._other] = records.without_remedy(exc)
            least = _DENIED_SECONDS if isinstance(exc, AccessDenied) else 0.0
            self._outage.failed(exc, self._errors[self._other], least=least)
            return self._outage.until
        self._outage.recovered()
        if self._again:
            self._errors[self._other] = f'this region refuses its results: {self._results.problem}'
        else:
            self._errors.pop(self._other, None)
            self._refusals.recovered()
        return min(self._arriving.next_at, self._taker.next_at, *self._again.values())

    def _process(self, changed: dict[str, Document | None]) -> None:
        docs = [doc for doc in changed.values() if doc]
        self._taker.ended(doc_id for doc_id, doc in changed.items() if doc is None)
        if results := [doc for doc in docs if doc['_id'].startswith(region.results_to(self._name))]:
            taken = self._results.take(results)
            delete_current(self._there, taken)
            left = {doc['_id'] for doc in results} - {doc['_id'] for doc in taken}
            self._again |= dict.fromkeys(left, time.monotonic() + DELAY_SECONDS)
            if left and self._results.problem:
                self._refusals.failed(self._results.problem)
        tasks = [doc for doc in docs if doc['_id'].startswith(region.records_to(self._name))]
        self._taker.take(tasks)
        self._lent[self._other] += sum('lent' in doc and region.state_of(doc) == 'sent' for doc in tasks)
        if (name := region.region_id(self._other)) in changed:
            self._lender.set_wants(changed[name])


class Decisions(Duty):
    """Decides about the tasks that this region gave to another one. Use it in one thread.

    It makes requests to this region only, so that an outage of the other one delays nothing. The other region may have
    been removed from the option `regions`.
    """

    process = 'this worker'

    def __init__(self, app: Any, transport: Any, wake: Callable[[], None], lead: SharedLead, other: str) -> None:
        """Use the connected `transport`. Another thread calls `wake()` when there is something to do."""
        super().__init__(lead)  # type: ignore[arg-type]  # it has the members that a duty uses
        own = region.database(transport.options.regions, transport.options.region)
        self._own = transport.couchdb.beside(own)
        self._home = Home(app, transport, self._own, other, wake)

    def begin(self) -> None:
        """Forget what a former term knew."""
        self._home.reset()

    def rest(self) -> float:
        """Follow nothing."""
        self._home.reset()
        return super().rest()

    def work(self, *, stale: bool) -> float:
        """Decide about the records that are due."""
        if stale:
            self._home.reset()
        self._home.step()
        return self._home.next_at - time.monotonic()

    def close(self) -> None:
        """Close the connections."""
        self._home.close()
        self._own.close()


def _duty(
    kind: type[Link | Decisions],
    app: Any,
    lead: SharedLead,
    other: str,
    connection: Any,
    wake: Callable[[], None],
) -> Duty:
    return kind(app, connection.connection, wake, lead, other)


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
