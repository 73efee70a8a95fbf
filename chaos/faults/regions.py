"""Faults of the links between regions and of the servers of regions."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from ..region_site import Link, Regions
from .base import Fault

__all__ = ['LinkCut', 'LinkFault', 'LinkHangs', 'RegionServerKilled']


class LinkFault(Fault):
    """A fault of a link, or of all links of a region. No worker is affected: nothing may run twice for it."""

    span, interrupts = (1.0, 60.0), False
    #: Whether the replications are written again afterwards; else the replicator waits as long as it has decided to.
    nudge = True

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

    def heal(self) -> None:
        """Restore the links."""
        for link in self.links:
            self.mend(link)
            if self.nudge:
                link.write()

    def mend(self, link: Link) -> None:
        """Restore a link."""
        raise NotImplementedError


class LinkCut(LinkFault):
    """Connections are cut, and new ones refused."""

    name = 'link cut'

    def begin(self, children: Mapping[str, int]) -> None:
        """Refuse connections."""
        for link in self.links:
            link.proxy.refuse()

    def mend(self, link: Link) -> None:
        """Accept connections."""
        link.proxy.restore()


class LinkHangs(LinkFault):
    """Connections are accepted, and nothing is passed on."""

    name = 'link swallows all'

    def begin(self, children: Mapping[str, int]) -> None:
        """Pass on nothing."""
        for link in self.links:
            link.proxy.hang()

    def mend(self, link: Link) -> None:
        """Pass on what was held back."""
        link.proxy.go_on()


class RegionServerKilled(Fault):
    """The server of a region is killed and started again; its worker cannot keep its leases meanwhile."""

    name, span = 'server killed', (1.0, 10.0)

    @property
    def locks(self) -> list[threading.Lock]:
        """The lock of the server, and those of the links that are written again."""
        links = self.site.links_of(self.region.name)  # type: ignore[attr-defined]
        return [*(link.lock for link in links), self.region.server.lock]

    @property
    def region(self) -> Any:
        """The region."""
        return self.site.all[self.target % len(self.site.all)]  # type: ignore[attr-defined]

    def begin(self, children: Mapping[str, int]) -> None:
        """Kill the server."""
        self.workers = [self.region.name]
        self.region.server.kill()

    def heal(self) -> None:
        """Start the server. The replicators of the other regions have failed meanwhile."""
        self.region.server.start()
        for link in self.site.links_of(self.region.name) if LinkFault.nudge else ():  # type: ignore[attr-defined]
            link.write()
