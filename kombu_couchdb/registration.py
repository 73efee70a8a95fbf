"""Registration of `couchdb://` with kombu, the check of our URLs, and their masks.

kombu has no entry point for transports, so `register` adds the schemes to kombu's table, and it wraps `urlparse`, which
kombu calls first with every broker URL. kombu parses a URL before it asks a transport, and its errors contain a part of
an unquoted password; the wrapper checks our URLs before that.

A process in which kombu gets one of our URLs or schemes *uses* CouchDB. Only there, `use` also replaces `sanitize_url`,
with which Celery masks passwords: kombu's version does not know lists of URLs.

This module imports nothing slow: kombu loads it in every application of the environment.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

_OURS = re.compile('couchdbs?:', re.IGNORECASE)

#: Functions that `use` calls, each time.
on_use: list[Callable[[], None]] = []


def register() -> None:
    """Add our schemes to kombu's table, unless another package has added them, and check our URLs."""
    from kombu.transport import TRANSPORT_ALIASES
    from kombu.utils import url

    for scheme in ('couchdb', 'couchdbs'):  # kombu calls an alias that is not a string
        TRANSPORT_ALIASES.setdefault(scheme, use)
    for scheme in ('http', 'https'):  # kombu has no transport with these names; ours explains the mistake
        TRANSPORT_ALIASES.setdefault(scheme, partial(_refuse, scheme))
    _wrap(url, 'urlparse', _check)
    if 'kombu.connection' in sys.modules:  # it has already imported the unwrapped function
        sys.modules['kombu.connection'].urlparse = url.urlparse  # type: ignore[attr-defined]


def use() -> str:
    """Complete this process, which uses CouchDB, and return the name of the transport for kombu."""
    mask()
    for install in on_use:
        install()
    return 'kombu_couchdb.transport:Transport'


@cache
def mask() -> None:
    """Let kombu mask the passwords in our URLs."""
    from kombu.utils import url

    from .couchdb.address import MASK, redacted

    _wrap(url, 'sanitize_url', lambda text, mask=MASK: redacted(text, mask))


def _refuse(scheme: str) -> None:
    from .couchdb.address import wrong_scheme

    use()
    raise wrong_scheme('broker_url', scheme)


def _check(url: str, *args: Any, **kwargs: Any) -> None:
    from .couchdb.address import check

    use()
    check(url, 'broker_url')


def _wrap(module: Any, name: str, ours: Callable[..., Any]) -> None:
    """Wrap a function of kombu whose first argument is a URL.

    For one of our URLs the wrapper calls `ours` and returns its result. If that is None, or for other URLs, it calls
    kombu's function.
    """
    theirs = getattr(module, name)

    @wraps(theirs)
    def either(url: Any, *args: Any, **kwargs: Any) -> Any:
        found = ours(url, *args, **kwargs) if isinstance(url, str) and _OURS.match(url) else None
        return theirs(url, *args, **kwargs) if found is None else found

    setattr(module, name, either)
