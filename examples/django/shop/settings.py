"""Settings of the shop. Those of Celery begin with `CELERY_`."""

from __future__ import annotations

import os
from pathlib import Path

BASE_DIR = Path(__file__).resolve().parent.parent

SECRET_KEY = os.environ.get('SECRET_KEY', 'not a secret: this is an example')
ALLOWED_HOSTS = ['localhost', '127.0.0.1']
INSTALLED_APPS = ['shop']
ROOT_URLCONF = 'shop.urls'
USE_TZ = True
# Django sets the time zone of its processes: of the worker's log, too. Its default is America/Chicago.
TIME_ZONE = 'UTC'
DEFAULT_AUTO_FIELD = 'django.db.models.BigAutoField'
DATABASES = {
    'default': {
        'ENGINE': 'django.db.backends.sqlite3',
        'NAME': os.environ.get('DATABASE', BASE_DIR / 'shop.sqlite3'),
        # A file: the worker opens it, too. Only one process sees a database in memory.
        'TEST': {'NAME': os.environ.get('TEST_DATABASE', BASE_DIR / 'test.sqlite3')},
    },
}

CELERY_BROKER_URL = 'couchdb://user:password@localhost:5984/celery'
CELERY_RESULT_BACKEND = 'couchdb://user:password@localhost:5984/celery_results'
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_RESULT_BACKEND_ALWAYS_RETRY = True
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
