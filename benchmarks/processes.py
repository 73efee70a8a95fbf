"""What processes of this machine use of its processors and its memory."""

from __future__ import annotations

import socket

__all__ = ['cpu_of', 'memory_of', 'server_of']


def server_of(host: str, port: int) -> int | None:
    """Return the id of the process that listens there, or None if it is elsewhere, or is not ours to see."""
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


def cpu_of(pid: int) -> float:
    """Return the CPU seconds that a process and all its descendants have used, those that have ended included."""
    import psutil

    root = psutil.Process(pid)
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])  # user, system, and both of its children that have ended
        except psutil.NoSuchProcess:
            pass  # ended just now: its parent counts it
    return total
