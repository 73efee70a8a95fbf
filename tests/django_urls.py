"""The URLs of a small Django project for tests."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.urls import path


def shop(request: HttpRequest) -> HttpResponse:
    """Show that Django responds."""
    return HttpResponse('the shop')


urlpatterns = [path('', shop)]
