"""The tasks of the shop."""

from __future__ import annotations

from celery import shared_task

from .models import Order


@shared_task
def confirm(order_id: int) -> str:
    """Confirm an order and return the text for the customer."""
    order = Order.objects.get(pk=order_id)
    order.confirmed = True
    order.save()
    return f'Dear {order.customer}, {order.amount} are to be paid.'
