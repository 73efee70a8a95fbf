"""The shop, and the page of Celery's queues below /celery: `uvicorn shop.asgi:application`."""

from __future__ import annotations

from django.core.asgi import get_asgi_application
from starlette.routing import Mount, Router

from celery_couchdb.web import create_app

from .celery import app

page = create_app(app)
application = Router([Mount('/celery', page)], default=get_asgi_application())
