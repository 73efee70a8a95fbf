"""The site: the app, the settings, the accounts and the sessions that all requests to the page share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .accounts import Accounts
from .operations import Operations
from .rendering import environment
from .sessions import Sessions

STATIC = Path(__file__).parent / 'static'


class Site:
    """What all requests share: the app, the settings, the accounts and the sessions."""

    def __init__(
        self,
        app: Any,
        *,
        read_only: bool,
        mask_args: bool,
        login: bool,
        trust_header: str | None,
        reader_role: str,
        pages: Sequence[Any],
    ) -> None:
        self.app, self.read_only, self.mask_args = app, read_only, mask_args
        self.login, self.trust_header = login, trust_header
        self.accounts, self.sessions = Accounts(app, reader_role), Sessions()
        self.operations = Operations()
        #: The pages, in the order of the menu: `view.Page`.
        self.pages = pages
        #: By name of a static file, a text that changes with its content.
        self.versions = {
            str(path.relative_to(STATIC)): hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            for path in STATIC.rglob('*.*')
        }
        self.templates = environment()
