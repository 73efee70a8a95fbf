"""The times at which a leader looks whether there is something to do, so that an idle region costs no requests.

A look is a few requests. After some looks that found nothing, the next one is made when CouchDB's changes feed reports
a message, a pause, or a worker that has come or gone: until then, one waiting request takes their place. Only a region
without messages waits so, because the feed costs the server something for each change.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kombu_couchdb.couchdb.changes import Follower
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.conflicts import SYNC
from kombu_couchdb.documents.ids import PAUSE

#: The number of looks that find nothing before the feed is followed.
_QUIET_LOOKS = 5

#: While the feed is followed, it is looked this often nevertheless: a consumer whose lease has ended, for example, is
#: not a change.
_RARELY_SECONDS = 60.0

#: A message may be claimed already when the feed reports it. `;` is the character after `:`, and consumers follow
#: pauses in the order of ids. Heartbeats, the later revisions of consumers, are no activity.
_SELECTOR = {
    '$or': [
        {'type': {'$in': ['WorkItem', 'Pause']}},
        {'type': 'Consumer', 'beats': 0},
        {'_deleted': True, '_id': {'$gt': PAUSE, '$lt': 'broker:consumer;'}},
    ]
}


class Activity:
    """The next change in a broker's database that matters to regions. Use it in one thread."""

    def __init__(self, broker: Client, wake: Callable[[], None]) -> None:
        """Another thread calls `wake()` when `take` has become true."""
        self._broker, self._since = broker, 0.0
        self._follower = Follower(broker, 'celery-couchdb-region-feed', wake)

    @property
    def is_enough(self) -> bool:
        """True if a look from now on is enough until the next change is reported.

        In a cluster, the node that is read may not have yet what another one stored before the feed was followed.
        """
        is_synchronised = self._broker.replicas == 1 or time.monotonic() >= self._since + SYNC
        return self._follower.is_following and is_synchronised

    def watch(self) -> None:
        """Report the next change from now on, once; one request, or none if that was asked for before."""
        if not self._follower.is_following:
            since = self._broker.sequence()
            self._since = time.monotonic()
            self._follower.follow(since, _SELECTOR)

    def take(self) -> bool:
        """Tell whether there was a change, or the feed has failed, since the last call."""
        return self._follower.take() is not None

    def pause(self) -> None:
        """Report nothing until the next call of `watch`."""
        self._follower.pause()

    def close(self) -> None:
        """End the thread of the feed."""
        self._follower.close()


class Looks:
    """The times of one kind of look."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self.reset()

    def reset(self) -> None:
        """Forget earlier looks: the next one is due."""
        #: The monotonic time of the next look.
        self.next_at = 0.0
        self._quiet, self._may_rest = 0, False

    def soon(self, seconds: float) -> None:
        """Look in so many seconds, or when the next look is due if that is earlier."""
        self.next_at, self._quiet = min(self.next_at, time.monotonic() + seconds), 0

    def begin(self, seconds: float) -> None:
        """Note that a look begins; the next one follows after so many seconds, unless `end` is told otherwise."""
        self.next_at, self._quiet = time.monotonic() + seconds, self._quiet + 1
        if self._quiet >= _QUIET_LOOKS:
            self._activity.watch()  # before the look: a later change is reported
        self._may_rest = self._activity.is_enough

    def end(self, *, found: bool) -> None:
        """Note whether the look has found something to do."""
        if found:
            self._quiet = 0
        elif self._quiet >= _QUIET_LOOKS and self._may_rest and self._activity.is_enough:
            self.next_at = time.monotonic() + _RARELY_SECONDS
