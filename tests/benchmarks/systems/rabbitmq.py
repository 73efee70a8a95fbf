"""RabbitMQ: kombu's transport for AMQP and Celery's RPC backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kombu import Connection

from .base import Place, System, fresh_name

__all__ = ['RabbitMQ']


class RabbitMQ(System):
    """Each place is a new queue."""

    name, title, server = 'rabbitmq', "kombu's AMQP on RabbitMQ, Celery's RPC results", 'RabbitMQ'
    default_port = 5672
    keeps_results = False

    def version(self) -> str:
        """Return the version of the server."""
        with Connection(self.url, connect_timeout=4) as connection:
            connection.ensure_connection(max_retries=1, interval_start=0)  # kombu's default waits two seconds
            return str(connection.connection.server_properties['version'])

    @contextmanager
    def place(self) -> Iterator[Place]:
        """Return a place with a new queue name, and delete the queue afterwards."""
        name = fresh_name()
        try:
            # As with the other systems, publishing returns when the server has the message.
            yield Place(self.url, name, backend='rpc://', options={'confirm_publish': True})
        finally:
            with Connection(self.url) as connection:
                connection.default_channel.queue_delete(name)
