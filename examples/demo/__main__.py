"""The demo: `python -m examples.demo`. The server is that of `COUCHDB_URL`, else an embedded one."""

from __future__ import annotations

import sys

from .interrupts import Interrupts, Stopped


def main() -> int:
    """Run the demo and return its exit status: 0 if all came true, 1 if not, 128 and the signal if it was stopped."""
    interrupts = Interrupts()
    try:
        # Not above, since this takes a while, in which Ctrl-C may come.
        from .run import run

        return run(interrupts)
    except Stopped:
        print('\nStopped.', flush=True)
        return 128 + interrupts.signal
    finally:
        interrupts.ignore()


if __name__ == '__main__':
    sys.exit(main())
