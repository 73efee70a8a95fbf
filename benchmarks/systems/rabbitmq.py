"""RabbitMQ: kombu's transport for AMQP and Celery's RPC backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kombu import Connection

from .base import Place, System, fresh_name

__all__ = ['RabbitMQ']


class RabbitMQ(System):
    """Every place is a queue of its own."""

    name, title, server = 'rabbitmq', "kombu's AMQP on RabbitMQ, Celery's RPC results", 'RabbitMQ'
    default_port = 5672
    keeps_results = False

    def version(self) -> str:
        """Return the server's version."""
        with Connection(self.url, connect_timeout=4) as connection:
            connection.ensure_connection(
                max_retries=1, interval_start=0
            )  # kombu would wait two seconds before it gives up
            return str(connection.connection.server_properties['version'])

    @contextmanager
    def place(self) -> Iterator[Place]:
        """Return a queue's name, and delete that queue afterwards."""
        name = fresh_name()
        try:
            # Like all others here, publishing returns when the server has the message.
            yield Place(self.url, name, backend='rpc://', options={'confirm_publish': True})
        finally:
            with Connection(self.url) as connection:
                connection.default_channel.queue_delete(name)
