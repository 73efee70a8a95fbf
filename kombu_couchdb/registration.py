"""Makes `couchdb://` known to kombu, which has no entry point for transports, and has kombu refuse and show URLs as we do.

kombu splits a broker's URL before it asks any transport, and its errors have a part of an unquoted password in them: so the
function that its modules call first with each URL checks those of ours. The one that masks a password, which Celery calls, knows
no list of URLs: so it leaves ours to `redaction`. Nothing that is slow is imported here: kombu loads this module in each app of
the environment.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from .couchdb.redaction import MASK, redacted

__all__ = ['register']

_OURS = re.compile('couchdbs?:', re.IGNORECASE)


def register() -> None:
    """Add our schemes to kombu's table, unless somebody else has them, and check their URLs before kombu reads them."""
    from kombu.transport import TRANSPORT_ALIASES
    from kombu.utils import url

    # Strings: kombu imports the transport when the first connection is made, and nothing before that.
    for scheme in ('couchdb', 'couchdbs'):
        TRANSPORT_ALIASES.setdefault(scheme, 'kombu_couchdb.transport:Transport')
    for scheme in ('http', 'https'):
        # kombu calls what is no string, and has no transport of these names: they are refused in words that help.
        TRANSPORT_ALIASES.setdefault(scheme, partial(_refuse, scheme))
    _before(url, 'sanitize_url', lambda text, mask=MASK: redacted(text, mask))
    _before(url, 'urlparse', _check)
    if 'kombu.connection' in sys.modules:  # it has imported the function already
        sys.modules['kombu.connection'].urlparse = url.urlparse  # type: ignore[attr-defined]


def _refuse(scheme: str) -> None:
    from .couchdb.urls import wrong_scheme

    raise wrong_scheme('broker_url', scheme)


def _check(url: str, *args: Any, **kwargs: Any) -> None:
    from .couchdb.urls import check

    check(url, 'broker_url')


def _before(module: Any, name: str, ours: Callable[..., Any]) -> None:
    """Have a function of kombu, whose first argument is a URL, return what `ours` returns for one of ours, unless it is None."""
    theirs = getattr(module, name)

    @wraps(theirs)
    def either(url: Any, *args: Any, **kwargs: Any) -> Any:
        found = ours(url, *args, **kwargs) if isinstance(url, str) and _OURS.match(url) else None
        return theirs(url, *args, **kwargs) if found is None else found

    setattr(module, name, either)
