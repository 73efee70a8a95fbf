"""Faults of the network between the server and its clients."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from ..proxy import Answer, Proxy
from ..site import Site
from .base import MOMENT, PAST_LEASE, WHILE, Fault

__all__ = ['BlackHole', 'Broken', 'ClockSet', 'Cut', 'Failing', 'Narrow', 'Refused', 'Slow', 'TooMany', 'Unavailable']


class NetworkFault(Fault):
    """A fault of the network of one worker, of the publishers, or of all."""

    span = WHILE

    def __init__(self, site: Site, target: int) -> None:
        super().__init__(site, target)
        choice = target % (len(site.places) + 2)
        self.places = site.places if choice == len(site.places) + 1 else site.places[choice : choice + 1]
        self.proxies = [place.proxy for place in self.places]
        if choice >= len(site.places):
            self.proxies.append(site.proxy)
        self.workers = [place.name for place in self.places]

    @property
    def locks(self) -> list[threading.Lock]:
        """The whole network: only one of its faults happens at a time."""
        return [self.site.network]

    def begin(self, children: Mapping[str, int]) -> None:
        """Break each proxy."""
        for proxy in self.proxies:
            self.break_(proxy)

    def heal(self) -> None:
        """Repair each proxy."""
        for proxy in self.proxies:
            self.mend(proxy)

    def break_(self, proxy: Proxy) -> None:
        """Break a proxy."""
        raise NotImplementedError

    def mend(self, proxy: Proxy) -> None:
        """Repair a proxy."""


class Cut(NetworkFault):
    """All connections are cut; new ones are accepted at once."""

    name, span = 'connections cut', MOMENT

    def break_(self, proxy: Proxy) -> None:
        """Cut all connections."""
        proxy.cut()


class Refused(NetworkFault):
    """Connections are cut and new ones refused, as if the server had ended."""

    name = 'connections refused'

    def break_(self, proxy: Proxy) -> None:
        """Refuse connections."""
        proxy.refuse()

    def mend(self, proxy: Proxy) -> None:
        """Accept connections again."""
        proxy.restore()


class Slow(NetworkFault):
    """Each chunk of a request or response is delayed by 0.1 s."""

    name = 'network slow'

    def break_(self, proxy: Proxy) -> None:
        """Add the delay."""
        proxy.delay = 0.1

    def mend(self, proxy: Proxy) -> None:
        """Remove the delay."""
        proxy.delay = 0.0


class Narrow(NetworkFault):
    """Each connection passes 250 kB per second, so that large messages take long."""

    name = 'link narrow'

    def break_(self, proxy: Proxy) -> None:
        """Limit the rate."""
        proxy.rate = 250_000.0

    def mend(self, proxy: Proxy) -> None:
        """Remove the limit."""
        proxy.rate = None


class ClockSet(NetworkFault):
    """The server's clock is minutes fast or slow for a while, which must not make any task run twice."""

    name, span, interrupts = 'server clock set', PAST_LEASE, False

    def __init__(self, site: Site, target: int) -> None:
        super().__init__(site, len(site.places) + 1)  # all clients see the same clock
        self.ahead = (60.0 + target % 240) * (1 if target % 2 else -1)

    def break_(self, proxy: Proxy) -> None:
        """Change the time in responses."""
        proxy.ahead = self.ahead

    def mend(self, proxy: Proxy) -> None:
        """Leave the time in responses unchanged."""
        proxy.ahead = 0.0


class BlackHole(NetworkFault):
    """Everything is accepted and nothing forwarded."""

    name = 'network swallows all'

    def break_(self, proxy: Proxy) -> None:
        """Hold back all traffic."""
        proxy.hang()

    def mend(self, proxy: Proxy) -> None:
        """Forward again, including what was held back."""
        proxy.go_on()


class Lie(NetworkFault):
    """Every second request receives a response that is not the server's."""

    answer: Answer

    def break_(self, proxy: Proxy) -> None:
        """Reply in place of the server."""
        proxy.lie(self.answer, every=2)

    def mend(self, proxy: Proxy) -> None:
        """Forward the server's responses."""
        proxy.be_honest()


class Failing(Lie):
    """Status 500 although the server has carried out the request."""

    name, answer = 'answer 500, though done', Answer(500, asked=True)


class Unavailable(Lie):
    """Status 503; the server does not receive the request."""

    name, answer = 'answer 503', Answer(503)


class TooMany(Lie):
    """Status 429 with `Retry-After: 1`; the server does not receive the request."""

    name, answer = 'answer 429, Retry-After', Answer(429, headers=(('Retry-After', '1'),))


class Broken(Lie):
    """Truncated JSON although the server has carried out the request."""

    name, answer = 'answer of broken JSON', Answer(200, b'{"total_rows":3,"rows":[{"id', asked=True)
