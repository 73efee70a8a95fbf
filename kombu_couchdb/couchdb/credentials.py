"""Sources of user and password, or of a token: the URL or a setting, a function, the environment, or a file."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from kombu.utils.imports import symbol_by_name

from .. import errors
from .address import BEARER, SECRETS, TOKENS, Address

_HEADER = re.compile(r'[!-~]+')

_FILE = 'file:'

#: Seconds before a refused password or API key is sent again: two processes can do so without locking their user.
REFUSED_SECONDS = 120.0


@dataclass(frozen=True)
class Credentials:
    """User (None: anonymous, or not known) and password."""

    user: str | None
    #: A password, a token or an API key, see `Address.auth`.
    password: str = field(repr=False)
    #: For how many seconds it is valid; None if that is not known.
    seconds: float | None = field(default=None, compare=False)


#: Without user and password.
ANONYMOUS = Credentials(None, '')


def may_change(address: Address) -> bool:
    """Tell whether the source of an address may supply another password after one was refused."""
    return bool(address.credentials) or callable(address.password)


def read(address: Address) -> Credentials:
    """Return user and password of an address, from their source if there is one.

    *Raises* `ConfigurationError` if they are missing or cannot be sent, or if the option `credentials` is wrong, and
    `ServerUnavailable` if the source fails.
    """
    try:
        found = _from_source(address) if address.credentials else _given(address)
    except errors.CouchDBError:
        raise
    except Exception as exc:
        found, failure = None, f'{type(exc).__name__}: {exc}'
    if found is None:
        # The error has no cause: the frames of a source that asks a server may contain what it sends.
        what = f'the {SECRETS[address.auth]}' if address.auth in BEARER else 'user and password'
        raise errors.ServerUnavailable(f'{address.server}: the source of {what} failed: {failure}')
    if problem := _problem(found, address.auth):
        raise errors.ConfigurationError(problem)
    return found


def _given(address: Address) -> Credentials:
    password = address.password() if callable(address.password) else address.password
    if address.auth in BEARER:
        return Credentials(address.user, (password or '').strip())
    return Credentials(address.user, password or '') if address.user else ANONYMOUS


def is_header(text: str) -> bool:
    """Tell whether a text can be sent in a header: `http.client` would raise an error that contains any other text."""
    return _HEADER.fullmatch(text) is not None


def _problem(found: Credentials, auth: str) -> str | None:
    """Return why credentials cannot be sent, without a part of them; None if they can."""
    if auth not in TOKENS:
        try:
            f'{found.user}:{found.password}'.encode()
        except UnicodeEncodeError:  # not raised further: the exception contains the password
            return 'user or password cannot be encoded as UTF-8'
        return None
    what = SECRETS[auth]
    if not found.password or (auth == 'proxy' and not found.user):
        needed = f'a user, and a {what}' if auth == 'proxy' else f'a{"n" * (what[0] == "A")} {what}'
        return (
            f'auth={auth!r} needs {needed}, in the place of the password: write '
            f'couchdb://{"user" * (auth == "proxy")}:…@host/db, or use the option credentials'
        )
    if not is_header(found.password) or (auth == 'proxy' and not is_header(str(found.user))):
        return f'the {what} must consist of printable ASCII characters without spaces, in one line'
    return None


# -- the option `credentials`


def environment(auth: str = 'basic') -> Credentials:
    """Return user and password from environment variables.

    `COUCHDB_USER` contains the user, which tokens and API keys do not need, and `COUCHDB_PASSWORD` the password.
    `COUCHDB_PASSWORD_FILE` contains instead the path of a file with the password, which is read at each call.

    *Raises* `ConfigurationError` if a variable is missing, `OSError` if the file cannot be read.
    """
    user, file = os.environ.get('COUCHDB_USER'), os.environ.get('COUCHDB_PASSWORD_FILE')
    if not (user or auth in BEARER) or not (file or 'COUCHDB_PASSWORD' in os.environ):
        also = '' if auth in BEARER else 'COUCHDB_USER, and '
        raise errors.ConfigurationError(
            f'credentials="environment" needs the environment variables {also}COUCHDB_PASSWORD or COUCHDB_PASSWORD_FILE'
        )
    return Credentials(user or None, _line(file) if file else os.environ['COUCHDB_PASSWORD'])


def _line(path: str) -> str:
    return Path(path).read_text('utf-8').rstrip('\r\n')


def _from_source(address: Address) -> Credentials:
    source, auth = str(address.credentials), address.auth
    if source == 'environment':
        found = environment(auth)
    elif source.startswith(_FILE):
        found = _from_file(source, auth)
    else:
        found = _from_function(source, auth)
    return replace(found, password=found.password.strip()) if auth in BEARER else found


def _from_file(source: str, auth: str) -> Credentials:
    text = _line(source.removeprefix(_FILE))
    if auth in BEARER:
        return Credentials(None, text)
    user, colon, password = text.partition(':')
    if not colon:
        del text, user  # recorded tracebacks show the variables of their frames
        raise errors.ConfigurationError(f'credentials={source!r}: the file must have one line, user:password')
    return Credentials(user, password)


def _from_function(source: str, auth: str) -> Credentials:
    try:
        function = symbol_by_name(source)
    except (ImportError, AttributeError, ValueError) as exc:
        raise errors.ConfigurationError(
            f'credentials={source!r} does not name a function that can be imported: {exc}'
        ) from exc
    if callable(function):
        found = function()
        if isinstance(found, str) and auth in BEARER:
            return Credentials(None, found)
        if isinstance(found, (tuple, list)) and len(found) == 2 and all(isinstance(part, str) for part in found):
            return Credentials(found[0] or None, found[1])
        del found  # recorded tracebacks show the variables of their frames
    returned = f'the {SECRETS[auth]} as text' if auth in BEARER else 'two strings, user and password'
    raise errors.ConfigurationError(f'credentials={source!r} must name a function that returns {returned}')
