"""The publisher process: sends the orders from standard input, and records in the ledger which were accepted."""

from __future__ import annotations

import itertools
import json
import logging
import sys
import time

from celery import chain, chord, group

from .plan import Order
from .tasks import app, body, early, late, ledger, part, tried

logger = logging.getLogger(__name__)

#: An argument that makes a message large: 100 kB.
_BALLAST = 'ballast ' * 12_500


def send(order: Order, name: str) -> list[str]:
    """Send an order and return the ids of its tasks. If it raises, it is unknown whether anything was sent."""
    if order.kind in ('group', 'chord', 'chain'):
        keys = [f'{name}/{number}' for number in range(order.size)]
        if order.kind == 'chain':
            chain(part.si(order.seconds, number).set(task_id=key) for number, key in enumerate(keys)).apply_async()
            return keys
        parts = [part.s(order.seconds, number).set(task_id=key) for number, key in enumerate(keys)]
        if order.kind == 'group':
            group(parts).apply_async()
            return keys
        chord(parts)(body.s().set(task_id=f'{name}/body'))
        return [*keys, f'{name}/body']
    if order.kind == 'planned':
        ledger.note('due', key=name, at=time.monotonic() + order.countdown, **{'try': 0})
        late.apply_async((order.seconds,), task_id=name, countdown=order.countdown, ignore_result=True)
    elif order.kind == 'tried':
        tried.apply_async((order.seconds, order.size), task_id=name)
    elif order.kind == 'large':
        late.apply_async((order.seconds, _BALLAST), task_id=name)
    else:
        {'late': late, 'early': early}[order.kind].apply_async((order.seconds,), task_id=name)
    return [name]


def tell(number: int) -> None:
    """Send an event as workers do."""
    try:
        with app.events.default_dispatcher() as dispatcher:
            dispatcher.send('chaos-news', number=number)
    except app.connection_for_write().recoverable_connection_errors as exc:
        logger.warning('the event was not sent: %r', exc)
    else:
        ledger.note('told', number=number, at=time.monotonic())


def main() -> None:
    """Send orders until standard input ends."""
    logging.basicConfig(format='%(asctime)s %(levelname)s %(name)s %(message)s')
    for line in sys.stdin:
        order = Order(**json.loads(line))
        if order.kind == 'news':
            tell(int(order.name))
            continue
        for number in itertools.count():
            try:
                keys = send(order, f'{order.name}.{number}')
            except app.connection_for_write().recoverable_connection_errors as exc:
                # It may have been sent all the same: the next attempt uses other ids.
                logger.warning('order %s was not accepted: %r', order.name, exc)
                continue
            ledger.note(
                'accepted',
                order=order.name,
                kind=order.kind,
                keys=keys,
                tries=order.size if order.kind == 'tried' else 1,
                early=order.kind == 'early' or not app.conf.task_acks_late,
                results=order.kind != 'planned',
            )
            break


if __name__ == '__main__':
    main()
