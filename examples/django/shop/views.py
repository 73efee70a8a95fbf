"""The views of the shop."""

from __future__ import annotations

from celery import uuid
from celery.exceptions import TimeoutError
from celery.result import AsyncResult
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from celery_couchdb import aio

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


async def show_task(request: HttpRequest, task_id: str) -> JsonResponse:
    """Return the state of a task, and its text if it has succeeded, after at most `wait` seconds."""
    result: AsyncResult[str] = AsyncResult(task_id)
    try:
        wait = min(float(request.GET.get('wait', 0)), 30.0)
        await aio.get(result, timeout=wait, propagate=False)
    except ValueError as exc:
        return JsonResponse({'errors': str(exc)}, status=400)
    except TimeoutError:
        return JsonResponse({'state': 'PENDING', 'text': None})
    # The result is known now: these attributes need no request to CouchDB.
    text = result.result if result.successful() else None
    return JsonResponse({'state': result.state, 'text': text})
