"""The URLs of the shop."""

from __future__ import annotations

from django.urls import path

from . import views

urlpatterns = [
    path('orders/', views.order),
    path('tasks/<str:task_id>/', views.show_task),
]
