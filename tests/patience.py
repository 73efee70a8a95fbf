"""Time limits of the tests, and connections that use them.

This module imports little, because the processes that tests start import it, too.
"""

from __future__ import annotations

from typing import Any

from kombu import Connection

from kombu_couchdb.couchdb.call import HTTPOptions

__all__ = ['PATIENCE', 'PatientConnection']

#: How long a test waits for an expected event, in seconds. No test depends on speed: only a test that hangs waits this
#: long.
PATIENCE = 180.0


class PatientConnection(Connection):
    """A connection with a time limit of `PATIENCE` for requests, unless its options set time limits.

    A server on a busy machine may respond late, although the leases in tests are short. The options do not allow users
    to combine a short lease with long time limits, because a request that hangs would cost the lease.
    """

    def create_transport(self) -> Any:
        """Return the transport, with the longer time limits."""
        transport = super().create_transport()
        if not {'request_timeout', 'connect_timeout'} & self.transport_options.keys():
            transport.couchdb.options = HTTPOptions(PATIENCE, PATIENCE)
        return transport
