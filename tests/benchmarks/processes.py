"""CPU time and memory of processes on this machine."""

from __future__ import annotations

import socket

__all__ = ['Spent', 'cpu_of', 'memory_of', 'server_of']


def server_of(host: str, port: int) -> int | None:
    """Return the id of the process that listens there; None if it is on another machine or may not be inspected."""
    import psutil

    try:
        if not any(info[4][0] in ('127.0.0.1', '::1') for info in socket.getaddrinfo(host, port)):
            return None
        listeners = [
            connection.pid
            for connection in psutil.net_connections('tcp')
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid
        ]
    except (OSError, psutil.AccessDenied):
        return None
    return min(listeners, default=None)


def memory_of(pid: int) -> float:
    """Return the resident memory of a process, without its children, in megabytes."""
    import psutil

    return float(psutil.Process(pid).memory_info().rss) / 1e6


def cpu_of(pid: int, *, alone: bool = False) -> float:
    """Return the CPU seconds of a process and all its descendants, including those that have ended.

    With `alone`, those of the process itself.
    """
    import psutil

    root = psutil.Process(pid)
    if alone:
        return sum(root.cpu_times()[:2])
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])  # user and system time, its own and that of its ended children
        except psutil.NoSuchProcess:
            pass  # it has just ended: its parent's times include it
    return total


class Spent:
    """The CPU time that a server has used since this object was created, or None if it cannot be measured."""

    def __init__(self, host: str, port: int) -> None:
        self._server = server_of(host, port)
        self._before = self._now()

    def milliseconds(self) -> float | None:
        """Return the milliseconds."""
        now = self._now()
        return None if now is None or self._before is None else (now - self._before) * 1000

    def _now(self) -> float | None:
        return None if self._server is None else cpu_of(self._server)
