"""URLs without their passwords, as they may be shown."""

from __future__ import annotations

import re

__all__ = ['MASK', 'redacted']

#: What is shown instead of a password; kombu shows the same.
MASK = '**'

#: Scheme, user and colon, and what follows up to the last `@` before the next URL of a list: an unquoted password may have any
#: other character in it.
_PASSWORD = re.compile(
    r'(\b[a-z][a-z0-9+.-]*://(?:(?!;[a-z][a-z0-9+.-]*://)[^:@])*:)(?:(?!;[a-z][a-z0-9+.-]*://).)*@',
    re.IGNORECASE | re.DOTALL,
)


def redacted(text: str, mask: str = MASK) -> str:
    """Return `text` with a mask for the password of each URL in it: one URL, or a list with semicolons between."""
    return _PASSWORD.sub(lambda found: f'{found[1]}{mask}@', text)
