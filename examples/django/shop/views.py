"""The views of the shop."""

from __future__ import annotations

from celery import uuid
from celery.result import AsyncResult
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from .models import Order
from .tasks import confirm


@csrf_exempt  # orders are sent by programs, not by forms
@require_POST
def order(request: HttpRequest) -> JsonResponse:
    """Store an order. Its confirmation is sent when the order is committed."""
    task_id = uuid()
    try:
        with transaction.atomic():
            new = Order.objects.create(
                customer=request.POST['customer'],
                amount=request.POST['amount'],
            )
            # `confirm.delay_on_commit(new.pk)` is shorter, but does not tell the id.
            confirm.apply_async_on_commit((new.pk,), task_id=task_id)
            new.full_clean()  # if this raises, no order is stored and no task is sent
    except ValidationError as exc:
        return JsonResponse({'errors': exc.message_dict}, status=400)
    return JsonResponse({'order': new.pk, 'task': task_id}, status=202)


def show_task(request: HttpRequest, task_id: str) -> JsonResponse:
    """Return the state of a task, and its text if it has succeeded."""
    result: AsyncResult[str] = AsyncResult(task_id)
    text = result.result if result.successful() else None
    return JsonResponse({'state': result.state, 'text': text})
