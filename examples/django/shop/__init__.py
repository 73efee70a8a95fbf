"""A shop in Django. Its Celery app is made with it, so that its tasks can be sent from everywhere."""

from .celery import app as celery_app

__all__ = ['celery_app']
