"""What the pages of one hub share: settings, catalog and broker."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

from traitlets import Bool
from traitlets.config import Configurable

from ..broker import Broker
from ..broker.hub import hub_broker
from ..broker.view import Overview
from ..catalog import Catalog, DeviceLimits, Environment
from ..catalog.watched import watched
from .cards import PAGE, Card, Wanted, frameworks_of, make_cards, usual_request

KEY = "gpuspawner_pages"

FRESH = 1.0
"""Seconds for which one look at the store serves everybody."""


@dataclass(frozen=True, slots=True)
class State:
    """What is free at one moment, and the cards of some environments."""

    overview: Overview
    cards: list[Card]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One page of a search."""

    state: State
    found: int
    total: int
    """Environments that its reader may hear of."""
    frameworks: list[str]
    """Of all of these."""
    page: int
    pages: int


class CatalogPages(Configurable):
    """The pages ``/hub/environments``."""

    public = Bool(
        True,
        config=True,
        help="""
        Whether environments, prices and what is free are shown to whoever has not signed in.

        No name of a member is on these pages. Example::

            c.CatalogPages.public = False
        """,
    )

    show_restricted = Bool(
        False,
        config=True,
        help="""
        Whether environments with ``allowed_groups`` are shown to others too, marked so.

        Without it nobody but those groups hears of them. Example::

            c.CatalogPages.show_restricted = True
        """,
    )

    settings: MutableMapping[str, Any]
    _seen: tuple[float, Overview | None] = (0.0, None)

    @classmethod
    def of(cls, settings: MutableMapping[str, Any]) -> CatalogPages:
        """The one of this hub, by the settings of a handler."""
        # Tornado's application copies its settings: what spawners share is in the Hub's own.
        shared: MutableMapping[str, Any] = settings["users"].settings
        if KEY not in shared:
            made = cls(config=shared["config"])
            made.settings = shared
            shared[KEY] = made
        found: CatalogPages = shared[KEY]
        return found

    @property
    def broker(self) -> Broker:
        """The hub's, which its spawners use too."""
        return hub_broker(self.settings, self.config, self.settings["log"])

    async def refresh_catalog(self) -> None:
        """Read a change of the catalog's file, if there is one, off the event loop."""
        if name := self.configured("catalog"):
            await watched(self.settings, name, self.settings["log"]).refresh()

    def catalog(self) -> Catalog:
        """The catalog as the file is now, or as it last was right. Raises ConfigError."""
        name = self.configured("catalog")
        if not name:
            return Catalog.single(devices=DeviceLimits(default=1, max=1024))
        return watched(self.settings, name, self.settings["log"]).current()

    def shown(self, catalog: Catalog, groups: Collection[str]) -> list[Environment]:
        """The environments that a reader in these groups hears of, in the file's order."""
        if self.show_restricted:
            return list(catalog.environments)
        return list(catalog.visible_to(groups))

    def search(self, catalog: Catalog, groups: Collection[str], wanted: Wanted, page: int) -> Found:
        """One page of what somebody looks for, the first is 1. Asks the store."""
        everything = self.shown(catalog, groups)
        found = [e for e in everything if wanted.takes(e)] if wanted else everything
        if wanted.at_once:
            outlooks = self.broker.outlooks({e.slug: usual_request(e) for e in found})
            found = [e for e in found if outlooks[e.slug].at_once]
        pages = max(1, math.ceil(len(found) / PAGE))
        page = min(page, pages)
        return Found(
            state=self.state(found[PAGE * (page - 1) : PAGE * page], groups),
            found=len(found),
            total=len(everything),
            frameworks=frameworks_of(everything),
            page=page,
            pages=pages,
        )

    def state(self, environments: Iterable[Environment], groups: Collection[str]) -> State:
        """The cards of these environments for a reader in these groups. Asks the store."""
        some = list(environments)
        overview = self._overview()
        outlooks = self.broker.outlooks({e.slug: usual_request(e) for e in some})
        closed = [e.slug for e in some if not e.visible_to(groups)]
        now, url = self.broker.clock(), f"{self.settings['hub'].base_url}environments"
        return State(overview, make_cards(some, overview, outlooks, now, url, closed))

    def _overview(self) -> Overview:
        """Of this second or the one before: whoever likes may ask, as often as they like."""
        since, known = self._seen
        if known is None or time.monotonic() - since > FRESH:
            known = self.broker.overview()
            self._seen = (time.monotonic(), known)
        return known

    def configured(self, trait: str) -> Any:
        """What the configuration says of the hub's spawner class, the nearest class first."""
        cls = self.settings["spawner_class"]
        sections = (c.__name__ for c in cls.__mro__ if c.__name__ in self.config)
        return next((self.config[s][trait] for s in sections if trait in self.config[s]), "")
