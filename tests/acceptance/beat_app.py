"""The app of the acceptance tests, for beats that are killed at a chosen line, or whose leases are short."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

from celery_couchdb.beat.scheduler import DueCall, Messages
from chaos.short_lease import shorten

from .app import app

__all__ = ['app']

_send = Messages.send


def _send_and_die(self: Messages, calls: Sequence[DueCall], seconds: float) -> Any:
    _send(self, calls, seconds)
    os.kill(os.getpid(), signal.SIGKILL)


if lease := os.environ.get('LEASE_SECONDS'):
    shorten(float(lease))
if os.environ.get('DIE_AFTER_SENDING'):
    Messages.send = _send_and_die  # type: ignore[method-assign]
