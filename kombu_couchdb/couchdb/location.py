"""The location of a database, which `celery couchdb vacuum --rotate` changes, and how requests follow it.

The name of a database in settings stays the same. After a move, the design document `DOCUMENT` of a third database,
`<name>-location`, names the *present* database, for example `<name>-r1`. Members can read that document and not write
it. A process asks for it only if CouchDB has answered that a database does not exist, or that it is *closed*: while it
is moved, a design document refuses all writes. So databases that were never moved need no request for it.

A refused write has changed nothing, so that it is sent again: to the present database, or, as long as the closed
database is the present one, after a pause.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from ..errors import CouchDBError, DatabaseMissing
from ..log import get_logger
from .address import Address
from .bounds import seconds_left
from .fork_safety import Shared

logger = get_logger(__name__)

#: The document in the database of `location_name` that names the present database in its member `database`.
DOCUMENT = '_design/celery-location'

#: How long a request waits in a closed database, in seconds: longer than the longest closing, see `admin.rotation`.
MAX_WAIT_SECONDS = 30.0

#: The first and the longest pause between two attempts meanwhile.
_MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.1, 0.4


class UpdateSequence(str):
    """An update sequence, and the present database that it is from: in another one it means nothing."""

    database: str

    @staticmethod
    def database_of(since: Any, present: str) -> str:
        """Return the database that the sequence `since` is from; any other `since` fits the `present` one."""
        return since.database if isinstance(since, UpdateSequence) else present

    @classmethod
    def of(cls, value: Any, database: str) -> UpdateSequence:
        """Return the sequence `value` of a database."""
        sequence = cls(value)
        sequence.database = database
        return sequence


class Location:
    """The present database, as this process knows it; the clients of a database share it. Thread-safe."""

    def __init__(self, given: str, *, moves: bool = True) -> None:
        """`given` is the name in settings; with `moves` false, the present database is always the one of this name."""
        self.given = self.database = given
        self.moves = moves

    @classmethod
    def of(cls, address: Address) -> Location:
        """Return the location of the database that an address names."""
        if not address.moves:
            return cls(address.database, moves=False)
        servers = frozenset(node.server for node in (address, *address.others))
        return _locations.of((servers, address.database), lambda: cls(address.database))

    def learn(self, document: Any) -> None:
        """Note what the location document says; None if there is none."""
        name = document.get('database') if isinstance(document, dict) else None
        present = name if isinstance(name, str) and number_of(self.given, name) else self.given
        if present != self.database:
            logger.info('the database %s is now the database %s', self.given, present)
            self.database = present


class Pursuit:
    """The attempts of one request to reach a database that is being moved."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._until, self._pause = time.monotonic() + MAX_WAIT_SECONDS, _MIN_PAUSE_SECONDS

    def follows(self, database: str, error: CouchDBError, locate: Callable[[], None]) -> bool:
        """Tell whether to send the request again, which `database` refused with `error`; wait if it is closed.

        `locate` lets the location learn where the database is. *Raises* its errors.
        """
        if self._location.database == database:
            locate()
        if self._location.database != database:
            return True
        left = min(self._until - time.monotonic(), seconds_left())
        if isinstance(error, DatabaseMissing) or left <= 0:
            return False
        time.sleep(min(self._pause, left))
        self._pause = min(MAX_PAUSE_SECONDS, 2 * self._pause)
        return True


def location_name(given: str) -> str:
    """Return the name of the database that says where the database `given` is."""
    return f'{given}-location'


def moved_name(given: str, number: int) -> str:
    """Return the name of the database to which the database `given` is moved as the move of this number."""
    return f'{given}-r{number}' if number else given


def number_of(given: str, database: str) -> int | None:
    """Return the number of the move that led to `database`: 0 for `given` itself; None if it is none of its names."""
    found = re.fullmatch(re.escape(given) + r'(?:-r([1-9][0-9]{0,8}))?', database)
    return int(found[1] or 0) if found else None


_locations: Shared[tuple[frozenset[str], str], Location] = Shared({})
