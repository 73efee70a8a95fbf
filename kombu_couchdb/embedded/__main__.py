"""Run the embedded server in the foreground: `python -m kombu_couchdb.embedded`."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence

from . import EmbeddedServer, EmbeddedServerError


def main(arguments: Sequence[str] | None = None) -> int | str:
    """Run the server until Ctrl-C or SIGTERM. Return the exit status, or the text of an error."""
    parser = argparse.ArgumentParser(
        prog='python -m kombu_couchdb.embedded',
        description='Run PouchDB in memory on 127.0.0.1 as a stand-in for CouchDB, for development only.',
    )
    parser.add_argument('--port', type=int, default=5984, help='0 for any free port (default: %(default)s)')
    parser.add_argument('--user', default='admin', help='(default: %(default)s)')
    parser.add_argument('--password', help='(default: a random one)')
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format='%(message)s')
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with EmbeddedServer(options.port, options.user, options.password) as server:
            print(
                f'{server.url} (in memory, for development only; Ctrl-C ends it)\n'
                f'{server.couchdb_url} (for broker_url and result_backend)',
                flush=True,
            )
            assert server.process is not None
            return f'The embedded server ended by itself, with status {server.process.wait()}.'
    except KeyboardInterrupt:
        return 0
    except EmbeddedServerError as exc:
        return f'{exc} Give another one with --port.' if 'EADDRINUSE' in str(exc) else str(exc)


if __name__ == '__main__':
    sys.exit(main())
