"""Jobs of a Celery app by task id: read their states, wait for them, change, remove and replay them.

`api` has the class `Jobs`, for operators and programs; no worker needs it. `editing` encodes other arguments.
"""

from .api import Jobs, Unreadable, client_of

__all__ = ['Jobs', 'Unreadable', 'client_of']
