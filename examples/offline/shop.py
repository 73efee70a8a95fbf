"""A shop that takes orders offline: `celery -A shop worker -l INFO` runs them when they arrive."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

app = Celery(
    'shop',
    broker='couchdb://user:password@localhost:5984/celery',
    backend='couchdb://user:password@localhost:5984/celery_results',
)
app.conf.broker_transport_options = {
    'parcels': os.environ.get('SHOP_PARCELS', 'celery_parcels'),
    # All that a device may ask for. `shop.refund` is not in the list.
    'parcels_accept': ['shop.order'],
}
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    result_backend_always_retry=True,
    broker_connection_retry_on_startup=True,
)

#: Prices in cents. Articles without a price are sold out.
PRICES = {'bread': 350, 'cheese': 1250, 'wine': None}


@app.task
def order(article: str, count: int) -> dict[str, Any]:
    """Take an order, and return the bill."""
    price = PRICES.get(article)
    if price is None:
        raise ValueError(f'{article} is sold out')
    if not 0 < count <= 100:
        raise ValueError('an order has 1 to 100 pieces')
    return {'article': article, 'count': count, 'total': price * count}


@app.task
def refund(amount: int) -> int:
    """Pay money back. Only the staff may send this task."""
    return amount
