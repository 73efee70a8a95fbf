"""Command line of the demo."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from celery.exceptions import CeleryError
from kombu.exceptions import KombuError

from kombu_couchdb.embedded import EmbeddedServerError
from kombu_couchdb.errors import CouchDBError

from .interrupts import Interrupts
from .server import DemoError
from .stage import Stage


def run(interrupts: Interrupts) -> int:
    """Read the command line, run the demo and return its exit status."""
    return run_demo(
        lambda patience: Stage(interrupts, patience).play(),
        'python -m examples.demo',
        'Run tasks with two workers, on the server in COUCHDB_URL or an embedded one.',
    )


def run_demo(play: Callable[[float], bool], prog: str, description: str) -> int:
    """Read the command line, call `play` with the factor of its time limits, and return the exit status."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument('--patient', action='store_true', help='multiply all time limits by ten, for slow machines')
    patience = 10.0 if parser.parse_args().patient else 1.0
    try:
        return 0 if play(patience) else 1
    except (DemoError, CouchDBError, EmbeddedServerError, KombuError, CeleryError) as exc:
        print(f'The demo cannot run: {exc}', file=sys.stderr)
        return 1
