"""The broker and the result backend of a test as nodes of pytest-celery."""

from __future__ import annotations

from typing import Any

from pytest_celery import CeleryTestBackend, CeleryTestBroker


class _Node:
    container: Any

    def config(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the container's `celeryconfig` updated with `kwargs`; `vhost` is another database on the server."""
        urls = self.container.urls(str(kwargs['vhost'])) if 'vhost' in kwargs else {}
        return {**self.container.celeryconfig, **kwargs, **urls}


class CouchDBTestBroker(_Node, CeleryTestBroker):
    """A CouchDB database as the broker."""

    def teardown(self) -> None:
        """Close the connections of the test's app, then delete the database."""
        if self.app:
            self.app.pool.force_close_all()
        super().teardown()


class CouchDBTestBackend(_Node, CeleryTestBackend):
    """A CouchDB database for results."""
