"""Bearer tokens: how long they are valid, and a server that exchanges an API key for them."""

from __future__ import annotations

import json
import threading
import time
from base64 import urlsafe_b64decode
from dataclasses import replace
from typing import Any, TypeGuard
from urllib.parse import urlencode

import requests

from .. import errors
from ..values import MAX_DATE, is_number
from . import credentials, failures
from .address import MASK, Address
from .call import Call
from .credentials import REFUSED_SECONDS, Credentials
from .http import Connections, LoginHeaders

#: The token server of IBM Cloud.
TOKEN_URL = 'https://iam.cloud.ibm.com/identity/token'

_GRANT_TYPE = 'urn:ibm:params:oauth:grant-type:apikey'

_FORM = LoginHeaders({'Content-Type': 'application/x-www-form-urlencoded'})

#: Where token servers say why they refuse a key: IBM's, those of OAuth 2 (RFC 6749), and CouchDB's member.
_REASONS = ('errorMessage', 'error_description', 'error', 'reason')


def described(token: str, user: str | None, seconds: float | None = None) -> Credentials:
    """Return the credentials of a bearer token, with the user and the validity that a JSON Web Token contains.

    `user` and `seconds` are used for a token without them. The token is not verified: CouchDB does that.
    """
    claims = _claims(token)
    name, ends = claims.get('sub'), claims.get('exp')
    if seconds is None and _is_time(ends):
        seconds = ends - time.time()
    return Credentials(name if isinstance(name, str) and name else user, token, seconds)


def _claims(token: str) -> dict[str, Any]:
    try:
        payload = token.split('.')[1]
        claims = json.loads(urlsafe_b64decode(payload + '=' * (-len(payload) % 4)))
    except (ValueError, IndexError, RecursionError):
        return {}
    return claims if isinstance(claims, dict) else {}


def _is_time(value: Any) -> TypeGuard[float]:
    return is_number(value) and abs(value) < MAX_DATE


class TokenServer:
    """Exchanges an API key for tokens. Thread-safe."""

    def __init__(self, address: Address) -> None:
        #: The source of the key.
        self._address = address
        self._url = address.token_url or TOKEN_URL
        self._token: Credentials | None = None
        #: The monotonic time at which the token ends.
        self._ends = 0.0
        #: The key that the server refused last, its reason, and the monotonic time until which it is not sent.
        self._refused: Credentials | None = None
        self._refused_reason, self._refused_until = '', 0.0
        self.reset()

    def reset(self) -> None:
        """Create a new lock in a forked child. The child uses the token of its parent."""
        self._lock = threading.Lock()

    def token(self, used: Credentials | None) -> Credentials:
        """Return a token that is valid, and another one than `used`.

        *Raises* `AccessDenied` if the server refused the key and no source can supply another one; `ServerUnavailable`
        if a source can, or if the server does not respond; `ConfigurationError` if it is no token server.
        """
        with self._lock:
            if self._token is None or self._token == used or time.monotonic() >= self._ends:
                self._token = self._exchange()
                seconds = self._token.seconds
                self._ends = float('inf') if seconds is None else time.monotonic() + seconds
            left = None if self._token.seconds is None else self._ends - time.monotonic()
            return replace(self._token, seconds=left)

    def _exchange(self) -> Credentials:
        key = credentials.read(self._address)
        if key == self._refused and time.monotonic() < self._refused_until:
            raise self._refusal()
        found = self._ask(key)
        if isinstance(found, errors.CouchDBError):
            raise found
        return found

    def _ask(self, key: Credentials) -> Credentials | errors.CouchDBError:
        """Return a token for a key, or the error. The frames of this method and those below have key and token."""
        form = urlencode({'grant_type': _GRANT_TYPE, 'apikey': key.password}).encode()
        connections = Connections(self._url)
        response = connections.exchange(Call('POST', '', body=form), _FORM)
        connections.close()
        if isinstance(response, errors.CouchDBError):
            return response
        if response.status_code in (400, 401, 403):
            self._refused, self._refused_reason = key, _reason(response, key)
            self._refused_until = time.monotonic() + REFUSED_SECONDS
            return self._refusal()
        if response.status_code != 200:
            return self._failure(response.status_code, _reason(response, key))
        found = failures.body_of(response)
        token, seconds = found.get('access_token'), found.get('expires_in')
        if not isinstance(token, str) or not credentials.is_header(token):
            return errors.BrokenAnswer(f'{self._url}: the response has no access_token; is the option token_url right?')
        return described(token, key.user, seconds if _is_time(seconds) else None)

    def _failure(self, status: int, reason: str) -> errors.CouchDBError:
        text = f'{self._url} responded with status {status}: {reason}'
        if status >= 500 or status == 429:
            return errors.ServerUnavailable(text)
        return errors.ConfigurationError(f'{text}; correct the option token_url')

    def _refusal(self) -> errors.CouchDBError:
        seconds = max(0.0, self._refused_until - time.monotonic())
        text = f'{self._url} refused the API key: {self._refused_reason}; the same key is not sent for {seconds:.0f} s'
        if credentials.may_change(self._address):
            return errors.ServerUnavailable(f'{text}, and its source is asked for a new one')
        return errors.AccessDenied(f'{text}; check the key in the place of the password')


def _reason(response: requests.Response, key: Credentials) -> str:
    """Return why a token server refuses a key, without the key."""
    found = failures.body_of(response)
    reason = next((found[name] for name in _REASONS if found.get(name)), response.reason or 'no reason given')
    return failures.one_line(reason)[:300].replace(key.password, MASK).rstrip('.')
