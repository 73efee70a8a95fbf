"""Metrics of tasks: what each worker counts, the history of the last day, and the export for Prometheus.

A worker counts its tasks in its main process (`counters`), and writes the counts with the heartbeat of its consumer,
which is written anyway: no task causes a write. One of the workers adds them up each minute (`history`).
"""
