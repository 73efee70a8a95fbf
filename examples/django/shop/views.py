"""What customers can ask the shop for."""

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


@csrf_exempt  # programs send orders, not forms
@require_POST
def order(request: HttpRequest) -> JsonResponse:
    """Take an order; it is confirmed when it is in the database, and not before."""
    task_id = uuid()
    try:
        with transaction.atomic():
            taken = Order.objects.create(customer=request.POST['customer'], amount=request.POST['amount'])
            # `confirm.delay_on_commit(taken.pk)` is shorter, but then nobody knows the id of the task.
            confirm.apply_async_on_commit((taken.pk,), task_id=task_id)
            taken.full_clean()  # if it raises, nothing is stored, and no task is sent
    except ValidationError as exc:
        return JsonResponse({'errors': exc.message_dict}, status=400)
    return JsonResponse({'order': taken.pk, 'task': task_id}, status=202)


def show_task(request: HttpRequest, task_id: str) -> JsonResponse:
    """Tell how far a task is."""
    result: AsyncResult[str] = AsyncResult(task_id)
    return JsonResponse({'state': result.state, 'text': result.result if result.successful() else None})
