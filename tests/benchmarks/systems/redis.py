"""Redis: kombu's own transport and Celery's own backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .base import Place, System, fresh_name

__all__ = ['Redis', 'RedisAlways']


class Redis(System):
    """Each place is a new key prefix in one database; other keys are not touched."""

    name, title, server = 'redis', "kombu's and Celery's Redis", 'Redis'
    default_port = 6379

    def version(self) -> str:
        """Return the version of the server."""
        import redis

        with redis.Redis.from_url(self.url, socket_connect_timeout=4) as client:
            return str(client.info('server')['redis_version'])

    @contextmanager
    def place(self) -> Iterator[Place]:
        """Return a place with a new prefix, and delete all keys with it afterwards."""
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


class RedisAlways(Redis):
    """A Redis that has each write on the disk before it answers, as CouchDB does: `appendfsync always`."""

    name, title = 'redis-always', 'the same on a Redis that syncs each write (``appendfsync always``)'

    def version(self) -> str:
        """Return the version of the server; *raises* `ValueError` if it does not sync each write."""
        import redis

        with redis.Redis.from_url(self.url, socket_connect_timeout=4, decode_responses=True) as client:
            found = client.config_get('append*')
        if (found.get('appendonly'), found.get('appendfsync')) != ('yes', 'always'):
            raise ValueError('this Redis does not have the settings appendonly yes and appendfsync always')
        return super().version()
