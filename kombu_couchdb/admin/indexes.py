"""The indexes of one database, those of other applications included: kept up to date while tombstones are taken away.

A row of an index whose document was purged before the index had seen its deletion stays for ever, if the index is compacted
at the wrong time (measured with CouchDB 3.5). So every copy of every index has seen all deletions before any purge. A view is
answered by the copy that is first, and `_info` speaks of the first alone; but each copy is asked, and `_active_tasks` tells
of all nodes when they have done what they were asked to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import cast
from urllib.parse import quote

from ..couchdb.client import Document
from ..couchdb.shapes import DONE, flag, maybe, members, number, rows
from ..errors import ConfigurationError, CouchDBError, NotFound, ServerUnavailable
from .cluster import Cluster, Refused

__all__ = ['Indexes']

#: Changes that an index takes in within one request, without a bar.
_FEW = 10_000

#: How long an index may make no progress, and work on it may go on, in seconds.
_STUCK = 300.0

#: How often all copies are asked where there are several, and the pause between, in seconds: one may miss a request.
_ROUNDS, _PAUSE = 3, 1.0

#: What CouchDB says of an index.
_INFO = members(
    view_index=members(
        update_seq=number,
        updater_running=flag,
        sizes=members(file=number),
        updates_pending=maybe(members(total=maybe(number))),
    )
)


class Indexes:
    """All indexes of one database."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._client = cluster, cluster.client
        self._built: list[tuple[str, str]] = []  # the path of a design document, and one of its views

    def designs(self) -> dict[str, str]:
        """Return one view of each design document that has views, by the name of the design document."""
        found = {}
        for row in self._client.id_range('_design/', docs=True):
            views = (row.get('doc') or {}).get('views')
            names = (
                [name for name, view in views.items() if isinstance(view, dict) and 'map' in view]
                if isinstance(views, dict)
                else []
            )
            if names:
                found[row['id'].removeprefix('_design/')] = names[0]
        return found

    def size(self) -> int:
        """Return the size of the files of all indexes, in bytes."""
        return sum(int(self._info(_path(name))['sizes']['file']) for name in self.designs())

    def settle(self, progress: Callable[[int, int], None], *, build: bool) -> None:
        """Bring every copy of every index up to date; `progress` is told how many changes are done, of how many.

        An index that was never built has no rows, and without `build` is left so. *Raises* `Refused` if one cannot be
        brought up to date.
        """
        several = self._client.is_cluster()
        found = [(_path(name), view, self._info(_path(name))) for name, view in self.designs().items()]
        # What is built from now on sees the tombstones only, and makes no row of them. Of one copy that can be known.
        found = [
            (path, view, info)
            for path, view, info in found
            if build or several or info['update_seq'] or info['updater_running']
        ]
        self._built = [(path, view) for path, view, _ in found]
        left = {path: _pending(info) for path, _, info in found}
        total = sum(left.values())
        for path, view in self._built:
            for pending in self._catch_up(path, view):
                left[path] = pending
                progress(max(0, total - sum(left.values())), total)
        for again in range(_ROUNDS if several else 1):
            if again:
                time.sleep(_PAUSE)
            self.digest()
            self._rest()
        progress(total, total)

    def digest(self) -> float:
        """Let every index take in what changed since, and return how long the slowest took, in seconds."""
        slowest = 0.0
        for path, view in self._built:
            began = time.monotonic()
            self._update(path, view)
            slowest = max(slowest, time.monotonic() - began)
        return slowest

    def compact(self) -> None:
        """Begin to compact all indexes, and delete the files of those that no design document describes any more."""
        self._client.request('POST', '/_view_cleanup', shape=DONE)
        for name in self.designs():
            self._client.request('POST', f'/_compact/{quote(name, safe="")}', shape=DONE)

    def _catch_up(self, path: str, view: str) -> Iterator[int]:
        """Yield how many changes an index has not seen, until they are few."""
        least, since = -1, time.monotonic()
        while (pending := _pending(self._info(path))) > _FEW:
            yield pending
            if pending < least or least < 0:
                least, since = pending, time.monotonic()
            elif time.monotonic() - since > _STUCK:
                raise Refused(
                    f'{self._client.address.url}{path}: this index makes no progress, and purging would spoil it; '
                    f'mend or delete its design document'
                )
            self._update(path, view, update='lazy')
            time.sleep(0.2)

    def _rest(self) -> None:
        """Wait until no node works on an index: a compaction that began before would bring old rows back."""
        since = time.monotonic()
        while self._cluster.busy('indexer', 'view_compaction'):
            if time.monotonic() - since > _STUCK:
                raise Refused(
                    f'{self._client.address.url}: its indexes are being built or compacted; try again after that'
                )
            time.sleep(0.05)

    def _update(self, path: str, view: str, update: str = 'true') -> None:
        params = {'limit': 0, 'reduce': False, 'update': update}
        try:
            self._client.request('GET', f'{path}/_view/{quote(view, safe="")}', params, repeat=True, shape=rows())
        except NotFound:
            pass  # the design document was deleted meanwhile, and so was its index
        except CouchDBError as exc:
            if isinstance(exc, ConfigurationError) or (isinstance(exc, ServerUnavailable) and exc.status is None):
                raise  # the connection, not the index
            raise Refused(
                f'{self._client.address.url}{path}: this index cannot be brought up to date, and purging would spoil '
                f'it; mend or delete its design document ({exc})'
            ) from exc

    def _info(self, path: str) -> Document:
        try:
            return cast(Document, self._client.request('GET', f'{path}/_info', repeat=True, shape=_INFO)['view_index'])
        except NotFound:
            return {'update_seq': 0, 'updater_running': False, 'sizes': {'file': 0}}


def _path(name: str) -> str:
    return f'/_design/{quote(name, safe="")}'


def _pending(info: Document) -> int:
    return int((info.get('updates_pending') or {}).get('total') or 0)
