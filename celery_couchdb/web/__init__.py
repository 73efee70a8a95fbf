"""A page for operators: the command `celery couchdb web`, and an ASGI application to mount into another one.

The page is live: see `live`. Its users are CouchDB's, and what they see and do is what CouchDB allows them: see
`accounts`. It needs the extra `web`: pip install 'celery-couchdb[web]'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ['create_app']


def create_app(
    app: Any,
    *,
    read_only: bool = False,
    mask_args: bool = False,
    login: bool = True,
    trust_header: str | None = None,
    reader_role: str = 'celery-reader',
) -> Starlette:
    """Return the page of a Celery app, an ASGI application.

    Users log in as CouchDB users. With `trust_header`, they do not: each request has the header of this name with the
    name of its user, which a proxy has set, and the page reads and acts as the app's CouchDB user. With `login=False`,
    it does so for everybody on this machine: it refuses requests from other machines, to other names than 127.0.0.1,
    ::1 and localhost, and with a header of a proxy.

    With `read_only`, nobody can change anything; otherwise those cannot who have the CouchDB role `reader_role`. With
    `mask_args`, the arguments and results of tasks are not shown.

    *Raises* `ConfigurationError` if the app's broker is not CouchDB.
    """
    from .application import application
    from .pages import PAGES
    from .site import Site

    return application(
        Site(
            app,
            read_only=read_only,
            mask_args=mask_args,
            login=login and trust_header is None,
            trust_header=trust_header,
            reader_role=reader_role,
            pages=[page for page in PAGES if page.applies(app)],
        )
    )
