"""The page of workers: who consumes what, since when there was no heartbeat, and who leads which duty."""

from __future__ import annotations

from starlette.responses import Response

from ...resources.workers import CONSUMERS, LEADERS
from ..tables import Table
from ..view import Page, View


def show(view: View) -> Response:
    """Show consumers and leaders."""
    found = view.snapshot().status
    if view.wants_json:
        return view.json(found['consumers'])
    consumers = Table.of(
        'Workers',
        CONSUMERS,
        found['consumers'],
        lambda row: row['id'],
        note=lambda row: ('', '') if row['alive'] else ('bad', 'overdue'),
        empty='No worker is running: start one with "celery -A your_app worker".',
    )
    leaders = Table.of('Duties', LEADERS, found['leaders'], lambda row: row['duty'])
    return view.render('workers.html', consumers=consumers, leaders=leaders)


page = Page('/workers', 'Workers', show, noun='worker')
