"""What can happen between the server and those who use it."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from ..proxy import Answer, Proxy
from ..site import Site
from .base import MOMENT, PAST_LEASE, WHILE, Fault

__all__ = ['BlackHole', 'Broken', 'ClockSet', 'Cut', 'Failing', 'Narrow', 'Refused', 'Slow', 'TooMany', 'Unavailable']


class NetworkFault(Fault):
    """One that hits the network of a place, of the publishers, or of all."""

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
        """The network as a whole: two faults of it do not mix."""
        return [self.site.network]

    def begin(self, children: Mapping[str, int]) -> None:
        """Break each proxy."""
        for proxy in self.proxies:
            self.break_(proxy)

    def heal(self) -> None:
        """Mend each proxy."""
        for proxy in self.proxies:
            self.mend(proxy)

    def break_(self, proxy: Proxy) -> None:
        """Break it."""
        raise NotImplementedError

    def mend(self, proxy: Proxy) -> None:
        """Mend it."""


class Cut(NetworkFault):
    """All connections are cut; new ones are accepted at once."""

    name, span = 'connections cut', MOMENT

    def break_(self, proxy: Proxy) -> None:
        """Cut."""
        proxy.cut()


class Refused(NetworkFault):
    """Connections are cut and new ones refused: a server that is dead, as far as anybody can see."""

    name = 'connections refused'

    def break_(self, proxy: Proxy) -> None:
        """Refuse."""
        proxy.refuse()

    def mend(self, proxy: Proxy) -> None:
        """Accept again."""
        proxy.restore()


class Slow(NetworkFault):
    """Each piece of a request or answer takes a tenth of a second."""

    name = 'network slow'

    def break_(self, proxy: Proxy) -> None:
        """Slow it down."""
        proxy.delay = 0.1

    def mend(self, proxy: Proxy) -> None:
        """No more."""
        proxy.delay = 0.0


class Narrow(NetworkFault):
    """A link through which a quarter of a megabyte passes in a second, in each connection: a large message takes its time."""

    name = 'link narrow'

    def break_(self, proxy: Proxy) -> None:
        """Limit the rate."""
        proxy.rate = 250_000.0

    def mend(self, proxy: Proxy) -> None:
        """No more."""
        proxy.rate = None


class ClockSet(NetworkFault):
    """The server's clock is set forward or back by minutes, and set right again: no reason for anything to run twice."""

    name, span, interrupts = 'server clock set', PAST_LEASE, False

    def __init__(self, site: Site, target: int) -> None:
        super().__init__(site, len(site.places) + 1)  # it is the same for all
        self.ahead = (60.0 + target % 240) * (1 if target % 2 else -1)

    def break_(self, proxy: Proxy) -> None:
        """Set it."""
        proxy.ahead = self.ahead

    def mend(self, proxy: Proxy) -> None:
        """Set it right."""
        proxy.ahead = 0.0


class BlackHole(NetworkFault):
    """Everything is accepted, and nothing passed on."""

    name = 'network swallows all'

    def break_(self, proxy: Proxy) -> None:
        """Pass on nothing."""
        proxy.hang()

    def mend(self, proxy: Proxy) -> None:
        """Pass on again, what was held back included."""
        proxy.go_on()


class Lie(NetworkFault):
    """Every second request gets an answer that is not the server's."""

    answer: Answer

    def break_(self, proxy: Proxy) -> None:
        """Lie."""
        proxy.lie(self.answer, every=2)

    def mend(self, proxy: Proxy) -> None:
        """Be honest."""
        proxy.be_honest()


class Failing(Lie):
    """500 for what the server has done all the same."""

    name, answer = 'answer 500, though done', Answer(500, asked=True)


class Unavailable(Lie):
    """503, and nothing done."""

    name, answer = 'answer 503', Answer(503)


class TooMany(Lie):
    """429 with Retry-After."""

    name, answer = 'answer 429, Retry-After', Answer(429, headers=(('Retry-After', '1'),))


class Broken(Lie):
    """JSON that ends in the middle, for what the server has done all the same."""

    name, answer = 'answer of broken JSON', Answer(200, b'{"total_rows":3,"rows":[{"id', asked=True)
