"""Faults of the links between regions and of the servers of regions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..proxy import Answer, Proxy
from ..region_site import Link, Regions
from .base import Fault

__all__ = [
    'LINK_FAULTS',
    'DocumentsRefused',
    'LinkCut',
    'LinkFault',
    'LinkHangs',
    'LinkSilent',
    'RegionServerKilled',
    'RequestsLate',
    'ResponsesLost',
]


#: After how many seconds a request arrives that is late: later than another leader may lead.
_LATE = 25.0

#: The design document that refuses others, and its condition: it is true for about half of all ids.
_REFUSAL = '_design/refusal'
_SOME = "doc._id.split('').reduce(function (sum, one) { return sum + one.charCodeAt(0); }, 0) % 2"


class LinkFault(Fault):
    """A fault of a link, or of all links of a region. No worker is affected: nothing may run twice for it."""

    span, interrupts = (1.0, 60.0), False
    #: What is called for each proxy to break a link, and to restore it.
    turn: tuple[Callable[[Proxy], None], Callable[[Proxy], None]]

    def __init__(self, site: Any, target: int) -> None:
        super().__init__(site, target)
        self.workers = []
        regions: Regions = site
        choices = [[link] for link in regions.links] + [regions.links_of(region.name) for region in regions.all]
        self.links: list[Link] = choices[target % len(choices)]

    @property
    def locks(self) -> list[threading.Lock]:
        """One lock for each link, in the order of the links."""
        return [link.lock for link in self.links]

    def begin(self, children: Mapping[str, int]) -> None:
        """Break the links."""
        for proxy in self._proxies:
            self.turn[0](proxy)

    def heal(self) -> None:
        """Restore the links."""
        for proxy in self._proxies:
            self.turn[1](proxy)

    @property
    def _proxies(self) -> list[Proxy]:
        return [proxy for link in self.links for proxy in link.proxies]


class LinkCut(LinkFault):
    """Connections are cut, and new ones refused."""

    name = 'link cut'
    turn = (Proxy.refuse, Proxy.restore)


class LinkHangs(LinkFault):
    """Connections are accepted, and nothing is passed on until the link is restored: then all of it."""

    name = 'link swallows all'
    turn = (Proxy.hang, Proxy.go_on)


class LinkSilent(LinkFault):
    """Nothing is passed on. The connections of this time stay silent for ever."""

    name = 'link forgets connections'
    turn = (Proxy.hang, Proxy.forget)


class ResponsesLost(LinkFault):
    """Every second request is done, and answered by an error."""

    name = 'link loses responses'
    turn = (lambda proxy: proxy.lie(Answer(500, asked=True), every=2), Proxy.be_honest)


class RequestsLate(LinkFault):
    """Every third request to databases of regions is answered by an error, and reaches the server much later."""

    name = 'requests arrive late'
    turn = (lambda proxy: proxy.lie(Answer(500, late=_LATE), every=3, database='-regions'), Proxy.be_honest)

    def __init__(self, site: Any, target: int) -> None:
        super().__init__(site, target)
        regions: Regions = site
        self.links = [*self.links, regions.own[target % len(regions.own)]]


#: All kinds of faults of links.
LINK_FAULTS: tuple[type[LinkFault], ...] = (LinkCut, LinkHangs, LinkSilent, ResponsesLost, RequestsLate)


class DocumentsRefused(Fault):
    """A function in two databases of a region refuses changes of some documents.

    In the database of regions these are those of records, and new results for other regions; in the other one, results
    of tasks that ran elsewhere. Deletions are refused, too.
    """

    name, span, interrupts = 'documents refused', (1.0, 60.0), False

    def __init__(self, site: Any, target: int) -> None:
        super().__init__(site, target)
        self.workers = []
        regions: Regions = site
        self.link = regions.own[target % len(regions.own)]

    @property
    def locks(self) -> list[threading.Lock]:
        """The lock of the region."""
        return [self.link.lock]

    def begin(self, children: Mapping[str, int]) -> None:
        """Store the functions."""
        region = self.link.to
        for kind, condition in (
            ('regions', "doc._id.indexOf('r:') == 0 || (old && !old._deleted)"),
            ('results', f"!doc._deleted && doc.region && doc.region != '{region.name}'"),
        ):
            rule = f"function (doc, old) {{ if (({condition}) && {_SOME}) throw({{forbidden: 'chaos'}}); }}"
            region.client[kind].put({'_id': _REFUSAL, 'validate_doc_update': rule})

    def heal(self) -> None:
        """Delete the functions."""
        for kind in ('regions', 'results'):
            client = self.link.to.client[kind]
            client.bulk([{**client.get(_REFUSAL), '_deleted': True}])


class RegionServerKilled(Fault):
    """A server of a region is killed and started again; if it is the only one, its worker cannot keep its leases."""

    name, span = 'server killed', (1.0, 10.0)

    def __init__(self, site: Any, target: int) -> None:
        super().__init__(site, target)
        regions: Regions = site
        nodes = [(region, server) for region in regions.all for server in region.servers]
        region, self.server = nodes[target % len(nodes)]
        self.workers = [region.name] if len(region.servers) == 1 else []

    @property
    def locks(self) -> list[threading.Lock]:
        """The lock of the server."""
        return [self.server.lock]

    def begin(self, children: Mapping[str, int]) -> None:
        """Kill the server."""
        self.server.kill()

    def heal(self) -> None:
        """Start the server."""
        self.server.start()
