"""Entry point of the demo, `make demo-managed`. It uses the server in `COUCHDB_URL`, else an embedded one."""

from __future__ import annotations

import sys

from examples.demo.__main__ import main

if __name__ == '__main__':
    sys.exit(main('examples.managed.demo'))
