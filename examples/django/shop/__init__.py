"""A shop in Django. The import makes sure that `shared_task` uses the Celery app."""

from .celery import app as celery_app

__all__ = ['celery_app']
