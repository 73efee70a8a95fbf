"""A real worker beside the worst documents that a member can write: it runs what is honest, and ends as it is told to."""

from __future__ import annotations

from tests.acceptance.conftest import Site, database, site
from tests.conftest import PATIENCE

from .worst import broker_texts, result_texts, store

__all__ = ['database', 'site']


def test_a_worker_beside_the_worst_documents(site: Site) -> None:
    site.set_up()
    store(site.client, broker_texts('celery'))
    store(site.server.client(site.results), result_texts())
    worker = site.worker('-l', 'INFO')
    assert site.send('add', 1, 2).get(timeout=PATIENCE) == 3
    assert site.app.control.ping(timeout=5)
    assert worker.container.terminate(PATIENCE) == 0
