"""The stream of events that keeps open pages up to date (server-sent events)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from .access import session_of
from .live import BrowserWatch
from .sessions import Session
from .site import Site
from .view import Form, View

#: How often a stream says that it is alive, and how far the actions in the background are, in seconds.
_HEARTBEAT_SECONDS, _PROGRESS_SECONDS = 15.0, 1.0


def events(site: Site) -> Callable[[Request], Any]:
    """Return the endpoint of the stream of events: `change`, `operations` and `problem` with HTML, and `end`."""

    async def endpoint(request: Request) -> Response:
        session, _ = await run_in_threadpool(session_of, site, request)
        headers = {'Cache-Control': 'no-store', 'X-Accel-Buffering': 'no'}
        stream = _stream(site, View(site, request, session, Form())) if session else _ended()
        return StreamingResponse(stream, media_type='text/event-stream', headers=headers)

    return endpoint


async def _ended() -> AsyncIterator[str]:
    yield 'event: end\ndata:\n\n'


async def _stream(site: Site, view: View) -> AsyncIterator[str]:
    session = view.session
    live, watch, has_problem = session.account.live, BrowserWatch(), False
    live.watch(watch)
    try:
        with session.open_page():
            yield 'retry: 2000\n\n'
            has_changed, operations = False, _operations(site, view)
            while not session.is_over:
                if (live.problem is not None) is not has_problem:
                    has_problem = not has_problem
                    yield f'event: problem\ndata: {_banner(site, session)}\n\n'
                if has_changed and not has_problem:
                    yield 'event: change\ndata:\n\n'
                if (shown := _operations(site, view)) != operations:
                    operations = shown
                    yield f'event: operations\ndata: {shown}\n\n'
                has_changed = await watch.wait(_PROGRESS_SECONDS if shown else _HEARTBEAT_SECONDS)
                if not has_changed:
                    yield ': alive\n\n'
            yield 'event: end\ndata:\n\n'
    finally:
        live.leave(watch)


def _operations(site: Site, view: View) -> str:
    text = site.templates.get_template('operations.html').render(site=site, view=view)
    return ' '.join(text.split())


def _banner(site: Site, session: Session) -> str:
    text = site.templates.get_template('banner.html').render(problem=session.account.live.problem)
    return ' '.join(text.split())
