"""The demo: `python -m examples.demo`. The server is that of `COUCHDB_URL`, else an embedded one."""

from __future__ import annotations

import argparse
import sys

from celery.exceptions import CeleryError
from kombu.exceptions import KombuError

from kombu_couchdb.embedded import EmbeddedServerError
from kombu_couchdb.errors import CouchDBError

from .interrupts import Interrupts, Stopped
from .server import DemoError
from .stage import Stage


def main() -> int:
    """Run the demo and return its exit status: 0 if all came true, 1 if not, 128 and the signal if it was stopped."""
    parser = argparse.ArgumentParser(prog='python -m examples.demo', description=__doc__)
    parser.add_argument('--patient', action='store_true', help='accept that the machine is slow: tenfold time limits')
    patience = 10.0 if parser.parse_args().patient else 1.0
    interrupts = Interrupts()
    try:
        return 0 if Stage(interrupts, patience).play() else 1
    except Stopped:
        print('\nStopped.', flush=True)
        return 128 + interrupts.signal
    except (DemoError, CouchDBError, EmbeddedServerError, KombuError, CeleryError) as exc:
        print(f'The demo cannot run: {exc}', file=sys.stderr)
        return 1


if __name__ == '__main__':
    sys.exit(main())
