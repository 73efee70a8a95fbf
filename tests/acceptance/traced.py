"""OpenTelemetry in a publisher, and in a worker that imports this module: spans are appended to the file `SPANS`.

A worker has the name of a signal of Celery in `TRACED_FROM`, as in docs/production/monitoring.rst.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from celery import signals
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

__all__ = ['trace']


class _ToFile(SpanExporter):
    def __init__(self, path: Path) -> None:
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append each span as one line of JSON."""
        with self._path.open('a') as file:
            for span in spans:
                file.write(json.dumps(json.loads(span.to_json())) + '\n')
        return SpanExportResult.SUCCESS


def trace(path: Path) -> TracerProvider:
    """Trace the tasks that this process sends and runs, and return the provider of tracers."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(_ToFile(path)))
    CeleryInstrumentor().instrument(tracer_provider=provider)
    return provider


def _trace_worker(**_: Any) -> None:
    trace(Path(os.environ['SPANS']))


if 'SPANS' in os.environ:  # the tests themselves have none
    getattr(signals, os.environ['TRACED_FROM']).connect(_trace_worker)
