"""Entry point of the demo, `make demo-managed`. It uses the server in `COUCHDB_URL`, else an embedded one."""

from __future__ import annotations

import sys

from examples.demo.interrupts import Interrupts, Stopped


def main() -> int:
    """Run the demo and return its exit status: 0 on success, 1 on failure, 128 + signal number if stopped."""
    interrupts = Interrupts()
    try:
        # Imported here: it takes a while, and Ctrl-C must work meanwhile.
        from .demo import run

        return run(interrupts)
    except Stopped:
        print('\nStopped.', flush=True)
        return 128 + interrupts.signal
    finally:
        interrupts.ignore()


if __name__ == '__main__':
    sys.exit(main())
