"""Headless Chromium, driven through its DevTools protocol on a pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import wait_for

__all__ = ['Page', 'PageLeft']

_FLAGS = (
    '--headless',
    '--no-sandbox',
    '--disable-gpu',
    '--disable-quic',
    '--no-first-run',
    '--disable-background-networking',
    '--disable-component-update',
    '--disable-sync',
    '--remote-debugging-pipe',
)

#: What Chromium answers for an expression whose page goes away.
_LEFT = (
    'Inspected target navigated or closed',
    'Execution context was destroyed.',
    'Cannot find default execution context',
)


class PageLeft(AssertionError):
    """Another page took the place of the one that an expression belongs to."""


class Page:
    """A page in a browser of its own, whose profile is in `folder`. The test is skipped if there is no Chromium."""

    def __init__(self, folder: Path, url: str) -> None:
        program = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
        if program is None:
            pytest.skip('there is no Chromium on this machine')
        (here, self._to), (self._from, there) = os.pipe(), os.pipe()
        # The browser reads commands from descriptor 3 and writes to 4; null bytes separate the messages.
        command = [program, *_FLAGS, f'--user-data-dir={folder}', 'about:blank']
        self._process = subprocess.Popen(
            ['bash', '-c', f'exec "$@" 3<&{here} 4>&{there}', 'bash', *command],
            pass_fds=(here, there),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(here)
        os.close(there)
        self._buffer, self._last, self._session = b'', 0, ''
        target = self._call('Target.createTarget', url=url)['targetId']
        self._session = self._call('Target.attachToTarget', targetId=target, flatten=True)['sessionId']

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression, or of its promise; fail if it raises an error.

        Raises `PageLeft` if the page goes away before the expression has a value.
        """
        found = self._call('Runtime.evaluate', expression=script, awaitPromise=True, returnByValue=True)
        assert 'exceptionDetails' not in found, found['exceptionDetails']
        return found['result'].get('value')

    def reload(self) -> None:
        """Load the page again, and wait until it is there."""
        self._expect_another(lambda: self._call('Page.reload'))

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until a condition holds for the page, or for one that takes its place meanwhile."""

        def holds() -> bool:
            try:
                return bool(condition() and self.run("document.readyState === 'complete'"))
            except PageLeft:
                return False

        wait_for(holds, what)

    def visit(self, url: str) -> None:
        """Load another page, and wait until it is there."""
        self._expect_another(lambda: self._call('Page.navigate', url=url))

    def submit(self, selector: str) -> None:
        """Click a button of a form, and wait until another page is there."""
        self._expect_another(lambda: self.run(f'document.querySelector({json.dumps(selector)}).click()'))

    def fill(self, selector: str, text: str) -> None:
        """Write into a field of a form."""
        self.run(f'document.querySelector({json.dumps(selector)}).value = {json.dumps(text)}')

    def text(self, selector: str = 'body') -> str:
        """Return the text that an element shows, in one line; '' if there is none."""
        found: str = self.run(f'(document.querySelector({json.dumps(selector)}) || {{}}).innerText || ""')
        return ' '.join(found.split())

    def press(self, key: str, code: int, text: str = '') -> None:
        """Press a key and let it go."""
        pressed = {'key': key, 'code': key, 'windowsVirtualKeyCode': code, **({'text': text} if text else {})}
        for kind in ('keyDown', 'keyUp'):
            self._call('Input.dispatchKeyEvent', type=kind, **pressed)

    def show(self, width: int, height: int = 800, *, dark: bool = False) -> None:
        """Change the size of the window in pixels, and the colours that its user prefers."""
        self._call(
            'Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {'name': 'prefers-color-scheme', 'value': 'dark' if dark else 'light'}
        self._call('Emulation.setEmulatedMedia', features=[scheme])

    def turn_scripts_off(self) -> None:
        """Run no scripts of pages from now on."""
        self._call('Emulation.setScriptExecutionDisabled', value=True)

    def picture(self) -> bytes:
        """Return a PNG of the page."""
        return base64.b64decode(self._call('Page.captureScreenshot', format='png')['data'])

    def _expect_another(self, act: Callable[[], Any]) -> None:
        self.run('window.isOld = true')
        try:
            act()
        except PageLeft:
            pass  # The other page came before the answer.
        self.wait(lambda: self.run('!window.isOld'), 'the page')

    def close(self) -> None:
        """End the browser."""
        with self._process as process:
            process.kill()
        os.close(self._to)
        os.close(self._from)

    def _call(self, method: str, **parameters: Any) -> Any:
        self._last += 1
        session = {'sessionId': self._session} if self._session else {}
        message = {'id': self._last, 'method': method, 'params': parameters, **session}
        os.write(self._to, json.dumps(message).encode() + b'\0')
        while True:
            while b'\0' not in self._buffer:
                read = os.read(self._from, 65_536)
                assert read, 'the browser has ended'
                self._buffer += read
            text, _, self._buffer = self._buffer.partition(b'\0')
            answer = json.loads(text)
            if answer.get('id') == self._last:
                if error := answer.get('error'):
                    raise (PageLeft if error['message'] in _LEFT else AssertionError)(error)
                return answer['result']
