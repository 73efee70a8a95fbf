"""Redis: kombu's own transport and Celery's own backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .base import Place, System, fresh_name

__all__ = ['Redis']


class Redis(System):
    """Every place is a prefix of its own in one database: nothing else there is touched."""

    name, title, server = 'redis', "kombu's and Celery's Redis", 'Redis'
    default_port = 6379

    def version(self) -> str:
        """Return the server's version."""
        import redis

        with redis.Redis.from_url(self.url, socket_connect_timeout=4) as client:
            return str(client.info('server')['redis_version'])

    @contextmanager
    def place(self) -> Iterator[Place]:
        """Return a prefix, and delete afterwards what has it."""
        import redis

        name = fresh_name()
        prefix = {'global_keyprefix': f'{name}:'}
        try:
            yield Place(
                self.url, name, backend=self.url, options=prefix, settings={'result_backend_transport_options': prefix}
            )
        finally:
            with redis.Redis.from_url(self.url) as client:
                for key in client.scan_iter(f'*{name}*', count=10_000):
                    client.unlink(key)
