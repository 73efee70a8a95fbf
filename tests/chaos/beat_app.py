"""The app of beats whose machine's clock is set: a file has the seconds by which the wall clock is wrong."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from celery import Celery

from .short_lease import shorten

__all__ = ['app']

_true, _file = time.time, Path(os.environ['CHAOS_CLOCK'])


def _wrong() -> float:
    try:
        return _true() + float(_file.read_text())
    except (OSError, ValueError):  # it is being written
        return _true()


time.time = _wrong
shorten(float(os.environ['CHAOS_LEASE']))
app = Celery('chaos')
app.conf.update(json.loads(os.environ['CHAOS_SETTINGS']))
