"""PostgreSQL: kombu's SQLAlchemy transport and Celery's database backend."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from .base import Place, System, fresh_name

__all__ = ['PostgreSQL']


class PostgreSQL(System):
    """Each place is a new database: the user must be allowed to create databases."""

    name, title, server = 'sqla', "kombu's and Celery's SQLAlchemy on PostgreSQL", 'PostgreSQL'
    default_port = 5432
    fills_fast = False

    def version(self) -> str:
        """Return the version of the server."""
        import sqlalchemy  # noqa: F401 - kombu's transport needs it; if it is missing the error names it

        return str(self._execute('SHOW server_version').split()[0])

    @contextmanager
    def place(self) -> Iterator[Place]:
        """Create a database, and drop it afterwards although connections may be open."""
        # kombu leaves its connections to the garbage collector: SQLAlchemy logs errors since their database is dropped.
        logging.getLogger('sqlalchemy.pool').setLevel(logging.CRITICAL)
        name = fresh_name()
        self._execute(f'CREATE DATABASE "{name}"')
        url = urlsplit(self.url)._replace(scheme='postgresql+psycopg2', path=f'/{name}').geturl()
        try:
            yield Place(f'sqla+{url}', 'bench', backend=f'db+{url}')
        finally:
            self._execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def _execute(self, statement: str) -> Any:
        import psycopg2

        connection = psycopg2.connect(self.url, connect_timeout=4)
        try:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(statement)
                return cursor.fetchone()[0] if cursor.description else None
        finally:
            connection.close()
