"""Masks for passwords in URLs, for logs and other output."""

from __future__ import annotations

import re

__all__ = ['MASK', 'redacted']

#: Replaces a password; kombu uses the same mask.
MASK = '**'

#: Scheme, user and colon, then everything up to the last `@` before the next URL of a list, because a password that is
#: not percent-encoded may contain any other character.
_PASSWORD = re.compile(
    r'(\b[a-z][a-z0-9+.-]*://(?:(?!;[a-z][a-z0-9+.-]*://)[^:@])*:)(?:(?!;[a-z][a-z0-9+.-]*://).)*@',
    re.IGNORECASE | re.DOTALL,
)


def redacted(text: str, mask: str = MASK) -> str:
    """Return `text`, one URL or several separated by semicolons, with `mask` in place of each password."""
    return _PASSWORD.sub(lambda found: f'{found[1]}{mask}@', text)
