"""How long tests wait, and connections that wait as long: light enough for the processes that tests start."""

from __future__ import annotations

from typing import Any

from kombu import Connection

__all__ = ['PATIENCE', 'PatientConnection']

#: How long a test waits for something that must come true, in seconds: only what hangs takes so long, since no test may depend on
#: speed.
PATIENCE = 180.0


class PatientConnection(Connection):
    """A connection whose requests may take longer than its options say, unless these say how long.

    A server on a busy machine may take its time, and a lease that a test waits for is short. No user may have both: a request
    that hangs would cost the lease. Here none hangs.
    """

    def create_transport(self) -> Any:
        """Return the transport, with other time limits."""
        transport = super().create_transport()
        if not {'request_timeout', 'connect_timeout'} & self.transport_options.keys():
            client = transport.couchdb
            client.timeouts = (PATIENCE, PATIENCE)
            for node in client._nodes._nodes:
                node.timeouts = client.timeouts
        return transport
