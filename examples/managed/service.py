"""A fake of a managed CouchDB service, such as IBM Cloudant: a proxy before a real CouchDB or the embedded server.

It limits reads, writes and queries in any second, offers less than CouchDB, refuses large documents, and, if told so,
takes only bearer tokens, which it hands out itself. Run it with ``python -m examples.managed.service``; `GET /_counts`
then returns what it has counted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import threading
import time
from base64 import b64encode
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from kombu_couchdb.couchdb.pacing import RequestKind, units_of

from .proxy import Proxy, Request, Response, refusal

#: The units that each plan has in a second, of the whole account; of Standard, this is one of its capacity units.
PLANS: dict[str, dict[RequestKind, int]] = {
    'lite': {RequestKind.READ: 20, RequestKind.WRITE: 10, RequestKind.QUERY: 5},
    'standard': {RequestKind.READ: 100, RequestKind.WRITE: 50, RequestKind.QUERY: 5},
    'unlimited': {},
}

#: The largest document and attachment, in bytes.
MAX_DOCUMENT, MAX_ATTACHMENT = 1 << 20, 10 << 20

#: Requests that are refused to every user, as method and path.
NOT_OFFERED = re.compile(
    r'\S+ /(_node|_cluster_setup|_users|_reshard|_membership)(/.*)?'
    r'|\S+ /[^/]+/(_purge|_purged_infos|_purged_infos_limit|_compact|_view_cleanup|_sync_shards)(/.*)?'
    r'|PUT /[^/]+/_revs_limit'
    r'|POST /_session'
)

#: Where an API key is exchanged for a token, and where the counts are.
TOKENS, COUNTS = '/identity/token', '/_counts'


class Allowance:
    """The units of one kind in any second. More than is left may be taken at once, and is paid off in the next ones."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        #: When units were taken, and how many. Those that are still to be paid off have a date in the future.
        self._taken: deque[tuple[float, int]] = deque()

    def take(self, units: int, now: float) -> bool:
        """Take units at `now`, in seconds; return False if none is left."""
        while self._taken and self._taken[0][0] <= now - 1.0:
            self._taken.popleft()
        left = self._limit - sum(taken for _, taken in self._taken)
        if left <= 0:
            return False
        while units > left:
            self._taken.append((now, left))
            units, left, now = units - left, self._limit, now + 1.0
        self._taken.append((now, units))
        return True


class Counts:
    """What the service has counted. Its lock is the caller's."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        #: Admitted units by kind.
        self.units: Counter[RequestKind] = Counter()
        #: Requests with 429 by kind.
        self.refused: Counter[RequestKind] = Counter()
        #: Requests that were refused with 429 when they were sent again, as method and path.
        self.refused_again: list[str] = []
        #: Admitted requests, and their units, by kind, method, database and place; see `Request`.
        self.requests: Counter[tuple[RequestKind, str, str, str]] = Counter()
        self.units_of_requests: Counter[tuple[RequestKind, str, str, str]] = Counter()
        self._by_second: Counter[tuple[RequestKind, int]] = Counter()
        self._waiting: set[tuple[Any, ...]] = set()

    def admit(self, request: Request, kind: RequestKind, units: int) -> None:
        """Count a request that is served."""
        self._waiting.discard(request.identity)
        self.units[kind] += units
        self._by_second[kind, int(time.monotonic() - self._began)] += units
        key = (kind, request.method, request.database, request.place)
        self.requests[key] += 1
        self.units_of_requests[key] += units

    def refuse(self, request: Request, kind: RequestKind) -> None:
        """Count a request that is refused with 429."""
        self.refused[kind] += 1
        if request.identity in self._waiting:
            self.refused_again.append(f'{request.method} {request.path}')
        self._waiting.add(request.identity)

    def as_json(self) -> dict[str, Any]:
        """Return everything, with the most units of each kind in one second, as `busiest`."""
        busiest: dict[str, int] = defaultdict(int)
        for (kind, _), units in self._by_second.items():
            busiest[kind.value] = max(busiest[kind.value], units)
        return {
            'seconds': round(time.monotonic() - self._began, 3),
            'units': {kind.value: units for kind, units in self.units.items()},
            'busiest': dict(busiest),
            'refused': {kind.value: count for kind, count in self.refused.items()},
            'refused_again': self.refused_again,
            'requests': [
                {
                    'kind': key[0].value,
                    'method': key[1],
                    'database': unquote(key[2]),
                    'place': key[3],
                    'requests': count,
                    'units': self.units_of_requests[key],
                }
                for key, count in self.requests.most_common()
            ],
        }


class Tokens:
    """Exchanges one API key for bearer tokens that end after some seconds, as IBM Cloud's IAM does."""

    def __init__(self, api_key: str, seconds: float) -> None:
        self._api_key = api_key
        #: How many seconds a new token is valid.
        self.seconds = seconds
        #: How many tokens were handed out.
        self.count = 0
        self._ends: dict[str, float] = {}

    def issue(self, form: bytes) -> Response:
        """Return a token for a form with the API key."""
        fields = parse_qs(form.decode())
        if fields.get('grant_type') != ['urn:ibm:params:oauth:grant-type:apikey']:
            return Response(400, {'errorCode': 'BXNIM0120E', 'errorMessage': 'Property grant_type is not supported.'})
        if fields.get('apikey') != [self._api_key]:
            return Response(400, {'errorCode': 'BXNIM0415E', 'errorMessage': 'Provided API key could not be found.'})
        token = secrets.token_urlsafe(32)
        self._ends[token] = time.monotonic() + self.seconds
        self.count += 1
        return Response(
            200,
            {
                'access_token': token,
                'refresh_token': 'not_supported',
                'token_type': 'Bearer',
                'expires_in': int(self.seconds),
                'expiration': int(time.time() + self.seconds),
                'scope': 'ibm openid',
            },
        )

    def revoke(self) -> None:
        """Make all tokens invalid at once."""
        self._ends.clear()

    def check(self, authorization: str) -> Response | None:
        """Return the refusal of a request with this header, or None."""
        scheme, _, token = authorization.partition(' ')
        if scheme.lower() != 'bearer':
            return refusal(401, 'unauthorized', 'You are not authorized: this service takes IAM tokens only.')
        if self._ends.get(token, 0.0) <= time.monotonic():
            return refusal(401, 'unauthorized', 'Token is invalid or has expired.')
        return None


class Service:
    """The service at `url`, in front of the CouchDB at `couchdb`, whose URL has user and password. A context manager.

    `limits` are the units of each kind in a second; a kind without a limit is served always. With `retry_after`, a
    response with status 429 says how many seconds to wait. `not_offered_status` is the status for what the service does
    not offer. With an `api_key`, requests need tokens, which are valid for `token_seconds`; without, the credentials
    of a request are those of CouchDB.
    """

    def __init__(
        self,
        couchdb: str,
        limits: Mapping[RequestKind, int],
        *,
        port: int = 0,
        retry_after: int | None = None,
        not_offered: re.Pattern[str] = NOT_OFFERED,
        not_offered_status: int = 403,
        api_key: str | None = None,
        token_seconds: float = 60.0,
    ) -> None:
        self._retry_after = {} if retry_after is None else {'Retry-After': str(retry_after)}
        self._not_offered, self._not_offered_status = not_offered, not_offered_status
        self.tokens = None if api_key is None else Tokens(api_key, token_seconds)
        self._lock = threading.Lock()
        self._allowances = {kind: Allowance(limit) for kind, limit in limits.items()}
        self.counts = Counts()
        parts = urlsplit(couchdb)
        login, at, _ = parts.netloc.rpartition('@')
        own = f'Basic {b64encode(unquote(login).encode()).decode()}' if self.tokens else None
        self._proxy = Proxy(parts, self._response, port, own)
        #: With user and password of CouchDB, unless tokens are needed.
        self.url = f'http://{"" if self.tokens else login + at}127.0.0.1:{self._proxy.port}'

    def restart_counts(self) -> None:
        """Count from zero."""
        with self._lock:
            self.counts = Counts()

    def snapshot(self) -> dict[str, Any]:
        """Return what was counted so far; see `Counts.as_json`."""
        with self._lock:
            return self.counts.as_json()

    def _response(self, request: Request) -> Response | None:
        """Return the service's own response; None if CouchDB answers the request."""
        if request.path == COUNTS:
            return Response(200, self.snapshot())
        if self.tokens is not None:
            if request.path == TOKENS:
                return self.tokens.issue(request.body)
            if refused := self.tokens.check(request.headers.get('Authorization', '')):
                return refused
        if self._not_offered.fullmatch(f'{request.method} {request.path}'):
            if self._not_offered_status == 403:
                return refusal(403, 'forbidden', 'one of _admin, server_admin is required for this request')
            return refusal(self._not_offered_status, 'not_implemented', 'this service does not offer this endpoint')
        return _too_large(request) or self._limited(request)

    def _limited(self, request: Request) -> Response | None:
        kind, units = units_of(request.method, request.below, request.size)
        with self._lock:
            allowance = self._allowances.get(kind)
            if allowance is None or allowance.take(units, time.monotonic()):
                self.counts.admit(request, kind, units)
                return None
            self.counts.refuse(request, kind)
        return refusal(
            429,
            'too_many_requests',
            "You've exceeded your rate limit allowance. Please try again later.",
            **self._retry_after,
        )

    def close(self) -> None:
        """End, and cut all connections."""
        self._proxy.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _too_large(request: Request) -> Response | None:
    if len(request.body) <= MAX_DOCUMENT or request.place not in ('document', '_design', '_local', '_bulk_docs'):
        return None
    content = json.loads(request.body)
    for doc in content['docs'] if request.place == '_bulk_docs' else [content]:
        for name, attachment in doc.get('_attachments', {}).items():
            if len(attachment.get('data', '')) * 3 // 4 > MAX_ATTACHMENT:
                return refusal(413, 'attachment_too_large', name)
        size = len(json.dumps({**doc, '_attachments': {}}, ensure_ascii=False).encode())
        if size > MAX_DOCUMENT:
            return refusal(413, 'document_too_large', doc.get('_id', ''))
    return None


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(prog='python -m examples.managed.service', description=__doc__)
    parser.add_argument('--couchdb', default=os.environ.get('COUCHDB_URL'), help='its URL; default: $COUCHDB_URL')
    parser.add_argument('--port', type=int, default=5983)
    parser.add_argument('--plan', choices=PLANS, default='lite')
    parser.add_argument('--retry-after', type=int, metavar='SECONDS', help='send the header Retry-After with a 429')
    parser.add_argument('--not-offered-status', type=int, choices=(403, 404, 405, 501), default=403)
    parser.add_argument('--token-seconds', type=float, help='take only tokens, which are valid for so long')
    options = parser.parse_args()
    if not options.couchdb:
        parser.error('set COUCHDB_URL to the URL of a CouchDB, or give it with --couchdb')
    api_key = None if options.token_seconds is None else secrets.token_urlsafe(16)
    with Service(
        options.couchdb,
        PLANS[options.plan],
        port=options.port,
        retry_after=options.retry_after,
        not_offered_status=options.not_offered_status,
        api_key=api_key,
        token_seconds=options.token_seconds or 0.0,
    ) as service:
        address = f'http://127.0.0.1:{options.port}'
        print(f'Serving at {address}; see {address}{COUNTS}. Ctrl-C ends it.', flush=True)
        if api_key:
            print(f'API key: {api_key}, token_url: {address}{TOKENS}', flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print(json.dumps(service.snapshot(), indent=2))


if __name__ == '__main__':
    main()
