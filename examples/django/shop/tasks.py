"""What the shop does in the background."""

from __future__ import annotations

from celery import shared_task

from .models import Order


@shared_task
def confirm(order_id: int) -> str:
    """Confirm an order, and return what the customer is told."""
    order = Order.objects.get(pk=order_id)
    order.confirmed = True
    order.save()
    return f'Dear {order.customer}, {order.amount} are to be paid.'
