"""Entry point of the demo, `python -m examples.demo`. It uses the server in `COUCHDB_URL`, else an embedded one."""

from __future__ import annotations

import sys
from importlib import import_module

from .interrupts import Interrupts, Stopped


def main(module: str = 'examples.demo.run') -> int:
    """Call `run` of a module and return the exit status: 0 on success, 1 on failure, 128 + signal number if stopped."""
    interrupts = Interrupts()
    try:
        # Imported here: it takes a while, and Ctrl-C must work meanwhile.
        status: int = import_module(module).run(interrupts)
        return status
    except BaseException as exc:
        # Python 3.11 and earlier turn what is raised while a class is made, as an import does, into a RuntimeError.
        if not isinstance(exc, Stopped) and not isinstance(exc.__cause__, Stopped):
            raise
        print('\nStopped.', flush=True)
        return 128 + interrupts.signal
    finally:
        interrupts.ignore()


if __name__ == '__main__':
    sys.exit(main())
