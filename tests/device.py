"""A device: PouchDB in Node.js, with its own database on disk, and a server that is not always within reach."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from kombu_couchdb.embedded import STACK_KILOBYTES, _find_node, install

from .support import ROOT

__all__ = ['Device', 'pouchdb']

_FILES = (ROOT / 'examples/offline/package.json', ROOT / 'examples/offline/package-lock.json', ROOT / 'tests/device.js')


def pouchdb() -> Path:
    """Return the folder with the PouchDB of `examples/offline`, which is installed at the first call."""
    return install(_FILES)


class Device:
    """A device with its data in `folder`; `url` is the URL of the database with which it replicates."""

    def __init__(self, folder: Path, url: str) -> None:
        self._process = subprocess.Popen(
            [_find_node()[0], f'--stack-size={STACK_KILOBYTES}', 'device.js', str(folder), url],
            cwd=pouchdb(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(self, method: str, *given: Any) -> Any:
        """Call a method of `device.js` and return its value; fail if it raises an error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, *given]) + '\n')
        self._process.stdin.flush()
        response = json.loads(self._process.stdout.readline() or '{"error": "Node.js has ended"}')
        assert 'error' not in response, response['error']
        return response['value']

    def close(self) -> None:
        """End the process. The data stays."""
        with self._process as process:
            process.kill()
