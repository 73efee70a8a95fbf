"""Messages without Celery: `shop.py send NAME…`, `shop.py work`, and `shop.py next`, which takes one message."""

from __future__ import annotations

import os
import sys
from typing import Any

from kombu import Connection, Exchange, Message, Queue
from kombu.mixins import ConsumerMixin

import kombu_couchdb  # noqa: F401 - makes couchdb:// known to kombu

orders = Queue('orders', Exchange('orders'), routing_key='orders')


def connect() -> Connection:
    """Return a connection to the broker's database."""
    return Connection(os.environ.get('BROKER_URL', 'couchdb://user:password@localhost:5984/shop'))


def send(*names: str) -> None:
    """Publish an order for each name."""
    with connect() as connection, connection.Producer(exchange=orders.exchange) as producer:
        for name in names:
            # When this returns, the order is on disk. If CouchDB does not respond, it tries again before it raises.
            producer.publish(
                {'name': name}, routing_key='orders', declare=[orders], retry=True, retry_policy={'max_retries': 3}
            )


class Worker(ConsumerMixin):
    """Receives orders until it is stopped, and connects again if the connection is lost."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def get_consumers(self, Consumer: Any, channel: Any) -> list[Any]:
        """Return the consumers that `run` starts."""
        return [Consumer([orders], callbacks=[self.on_order], prefetch_count=10)]

    def on_order(self, body: dict[str, Any], message: Message) -> None:
        """Process an order. If this process is killed before the ack, another one receives the order."""
        print('sold', body['name'], flush=True)
        message.ack()


def work() -> None:
    """Receive orders until Ctrl-C."""
    with connect() as connection:
        try:
            Worker(connection).run()
        except KeyboardInterrupt:
            print('closed')


def next_order() -> None:
    """Take one order, if there is one."""
    with connect() as connection, connection.SimpleQueue(orders) as queue:
        try:
            message = queue.get(timeout=1)
        except queue.Empty:
            print('no order')
        else:
            print('next', message.payload['name'])
            message.ack()


if __name__ == '__main__':
    {'send': send, 'work': work, 'next': next_order}[sys.argv[1]](*sys.argv[2:])
