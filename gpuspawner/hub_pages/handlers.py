"""The Hub's pages of environments, and the relay from a server to our service.

The pages are JupyterHub handlers, so that its templates, its sign-in and its cookies go on working.

A server in a container reaches the hub's API and nothing else of this machine. What it asks about
itself is handed to the service with the token that it came with, and the service decides: this
adds no right. Cookies, bodies and whatever else came with it stay here.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

from jupyterhub import orm
from jupyterhub.apihandlers.base import APIHandler
from jupyterhub.handlers.base import BaseHandler
from jupyterhub.objects import Server
from jupyterhub.user import User
from tornado import httputil, web
from tornado.http1connection import HTTP1Connection
from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest
from tornado.httputil import url_concat
from tornado.web import GZipContentEncoding
from traitlets import Bool
from traitlets.config import Configurable

from ..catalog.loader import Catalog, watched
from ..catalog.models import DeviceLimits, Environment
from ..core.errors import GPUSpawnerError
from ..devices.snapshots import Overview
from ..services import Services, hub_services
from .cards import (
    LONGEST,
    PAGE,
    Card,
    CardFilter,
    Details,
    frameworks_of,
    logo_file,
    make_cards,
    read_details,
    usual_request,
)

KEY = "gpuspawner_pages"

FRESH = 1.0
"""Seconds for which one look at the store serves everybody."""


@dataclass(frozen=True, slots=True)
class State:
    """What is free at one moment, and the cards of some environments."""

    overview: Overview
    cards: list[Card]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundEnvironments:
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
    def services(self) -> Services:
        """The hub's, which its spawners use too."""
        return hub_services(self.settings, self.config, self.settings["log"])

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

    def search(
        self, catalog: Catalog, groups: Collection[str], wanted: CardFilter, page: int
    ) -> FoundEnvironments:
        """One page of what somebody looks for, the first is 1. Asks the store."""
        everything = self.shown(catalog, groups)
        found = [e for e in everything if wanted.takes(e)] if wanted else everything
        if wanted.at_once:
            outlooks = self.services.positions.outlooks({e.slug: usual_request(e) for e in found})
            found = [e for e in found if outlooks[e.slug].at_once]
        pages = max(1, math.ceil(len(found) / PAGE))
        page = min(page, pages)
        return FoundEnvironments(
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
        outlooks = self.services.positions.outlooks({e.slug: usual_request(e) for e in some})
        closed = [e.slug for e in some if not e.visible_to(groups)]
        now, url = self.services.clock(), f"{self.settings['hub'].base_url}environments"
        return State(overview, make_cards(some, overview, outlooks, now, url, closed))

    def _overview(self) -> Overview:
        """Of this second or the one before: whoever likes may ask, as often as they like."""
        since, known = self._seen
        if known is None or time.monotonic() - since > FRESH:
            known = self.services.monitoring.overview()
            self._seen = (time.monotonic(), known)
        return known

    def configured(self, trait: str) -> Any:
        """What the configuration says of the hub's spawner class, the nearest class first."""
        cls = self.settings["spawner_class"]
        sections = (c.__name__ for c in cls.__mro__ if c.__name__ in self.config)
        return next((self.config[s][trait] for s in sections if trait in self.config[s]), "")


class StaticGzip(GZipContentEncoding):
    """Compresses files below ``static/``, which everybody gets alike.

    Not pages: what a page holds of its reader's could be told from its compressed length.
    """

    def __init__(self, request: httputil.HTTPServerRequest) -> None:
        super().__init__(request)
        self._static = "/static/" in request.path and "Range" not in request.headers

    def transform_first_chunk(
        self, status_code: int, headers: httputil.HTTPHeaders, chunk: bytes, finishing: bool
    ) -> tuple[int, httputil.HTTPHeaders, bytes]:
        if self._static:
            return super().transform_first_chunk(status_code, headers, chunk, finishing)
        self._gzipping = False
        return status_code, headers, chunk


FILES = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
"""What a file beside the catalog may do when it is opened by itself: a drawing can hold scripts."""

BODY_BYTES = 64 * 1024
"""Of a request to the Hub's pages that are ours; the connection of one with more is closed."""
BODY_SECONDS = 30.0


@web.stream_request_body
class DropsBody(web.RequestHandler):
    """For a handler of the Hub that takes no body: one that comes is dropped as it comes."""

    def set_default_headers(self) -> None:
        super().set_default_headers()
        # A refusal is sent before the body was read, and ends the connection: no proxy may send
        # the next request by it.
        if {"Content-Length", "Transfer-Encoding"} & set(self.request.headers):
            self.set_header("Connection", "close")

    async def prepare(self) -> None:
        """Limit the body, before any of it is read."""
        connection = self.request.connection
        if isinstance(connection, HTTP1Connection):
            connection.set_max_body_size(BODY_BYTES)
            connection.set_body_timeout(BODY_SECONDS)
        if (prepared := super().prepare()) is not None:
            await prepared

    def data_received(self, chunk: bytes) -> None:
        """Drop it."""


class HubPageHandler(DropsBody, BaseHandler):
    """What these pages share."""

    async def prepare(self) -> None:
        """Who has not signed in is sent there, where the admin wants that."""
        await super().prepare()
        await self.site.refresh_catalog()
        if not self._finished and not self.site.public and self.current_user is None:
            self.redirect(url_concat(self.get_login_url(), {"next": self.request.uri}))

    @property
    def site(self) -> CatalogPages:
        return CatalogPages.of(self.settings)

    @property
    def groups(self) -> frozenset[str]:
        """Those of the reader; none for whoever has not signed in, and for a service."""
        user = self.current_user
        return frozenset(group.name for group in getattr(user, "groups", ()))

    @property
    def running(self) -> bool:
        """Whether the reader's default server runs: then no launch would start another."""
        user = self.current_user
        if not isinstance(user, User):
            return False
        known = user.orm_user.orm_spawners.get("")
        return bool(known and known.server)

    def catalog(self) -> Catalog:
        try:
            return self.site.catalog()
        except GPUSpawnerError as error:
            self.log.error("The catalog cannot be shown: %s", error.message)
            sentence = "The environments cannot be shown just now. Try again in a moment."
            raise web.HTTPError(503, sentence) from None

    def shown(self) -> list[Environment]:
        return self.site.shown(self.catalog(), self.groups)

    async def ask(self, work: Any, *args: Any) -> Any:
        """Ask off the event loop; what the services refuse becomes the page's sentence."""
        try:
            return await self.site.services.read(work, *args)
        except GPUSpawnerError as error:
            raise web.HTTPError(error.status_code, "%s", error.message) from None

    async def show(self, template: str, **values: Any) -> None:
        """Send a page."""
        page = await self.render_template(
            template,
            no_spawner_check=True,  # else the bar of every page would make a spawner
            environments_url=f"{self.hub.base_url}environments",
            running=self.running,
            **values,
        )
        self.set_header("Cache-Control", "no-store")
        self.finish(page)

    def environment(self, slug: str) -> Environment:
        found = next((e for e in self.shown() if e.slug == slug), None)
        if found is None:
            who = "" if self.current_user else " Some are shown only after signing in."
            raise web.HTTPError(404, "There is no environment %r on this hub.%s", slug[:60], who)
        return found


class Environments(HubPageHandler):
    """All of them, as cards to search."""

    async def get(self) -> None:
        wanted, page = self._wanted(), self._page()
        found: FoundEnvironments = await self.ask(
            self.site.search, self.catalog(), self.groups, wanted, page
        )
        await self.show(
            "environments.html",
            cards=found.state.cards,
            overview=found.state.overview,
            look=found,
            wanted=wanted,
            link_to=self._link_to,
        )

    def _wanted(self) -> CardFilter:
        gpu = self.get_argument("gpu", "")
        return CardFilter(
            words=self.get_argument("q", "")[:LONGEST],
            gpu=gpu if gpu in ("with", "without") else "",
            framework=self.get_argument("framework", "")[:LONGEST],
            at_once=bool(self.get_argument("now", "")),
        )

    def _page(self) -> int:
        text = self.get_argument("page", "1")
        return max(1, int(text)) if text.isascii() and text.isdigit() and len(text) < 6 else 1

    def _link_to(self, page: int) -> str:
        """The same search, another page of it."""
        names = ("q", "gpu", "framework", "now")
        query = {n: value for n in names if (value := self.get_argument(n, ""))}
        return url_concat(self.request.path, {**query, "page": str(page)})


class LiveEnvironments(HubPageHandler):
    """What is free now, for the pages that are open: JSON by slug, of the slugs asked for."""

    def get_content_type(self) -> str:
        return "application/json"

    async def get(self) -> None:
        slugs = set(self.get_argument("slugs", "").split(",")[:PAGE])
        some = [e for e in self.shown() if e.slug in slugs]
        state: State = await self.ask(self.site.state, some, self.groups)
        self.set_header("Cache-Control", "no-store")
        self.finish({card.slug: {"now": card.now, "at_once": card.at_once} for card in state.cards})


class OneEnvironment(HubPageHandler):
    """All about one environment."""

    async def get(self, slug: str) -> None:
        environment = self.environment(slug)
        groups = self.groups
        state: State = await self.ask(self.site.state, [environment], groups)
        details: Details = await self.ask(read_details, self.catalog(), environment, groups)
        for trouble in details.troubles:
            self.log.warning("The catalog: %s", trouble)
        link = url_concat(f"{self.hub.base_url}spawn", {"opt-environment": environment.slug})
        await self.show(
            "environment.html",
            card=state.cards[0],
            overview=state.overview,
            details=details,
            launch=link,
            shared=f"{self.request.protocol}://{self.request.host}{link}",
        )


class Logo(HubPageHandler):
    """The logo of an environment, from beside the catalog."""

    @property
    def content_security_policy(self) -> str:
        return FILES

    async def get(self, slug: str) -> None:
        environment = self.environment(slug)
        try:
            content, kind = await self.site.services.read(logo_file, self.catalog(), environment)
        except ValueError:
            raise web.HTTPError(404, "This environment has no logo.") from None
        self.set_header("Content-Type", kind)
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Cache-Control", "max-age=3600")
        self.finish(content)


PATHS = {
    "GET": re.compile("leases/[0-9a-f]{1,64}/now"),
    "POST": re.compile("leases/[0-9a-f]{1,64}/(snooze|extend|end)"),
}
"""What a server may ask, and order."""

TIMEOUTS = {"GET": 8.0, "POST": 20.0}
"""Seconds. A stop answers after the Hub's ``slow_stop_timeout``, which is 10."""


class Relay(DropsBody, APIHandler):
    """Hands on what is in :data:`PATHS`, of who comes with a token. A body is dropped."""

    async def get(self, path: str) -> None:
        """What a server asks."""
        await self._hand_on(path)

    async def post(self, path: str) -> None:
        """What a server orders."""
        await self._hand_on(path)

    async def _hand_on(self, path: str) -> None:
        method = str(self.request.method)
        if not PATHS[method].fullmatch(path):
            raise web.HTTPError(404)
        if self.current_user is None or not self.get_auth_token():
            raise web.HTTPError(403)
        request = HTTPRequest(
            f"{self._service()}api/{path}",
            method=method,
            headers={"Authorization": f"token {self.get_auth_token()}"},
            body=b"{}" if method == "POST" else None,
            request_timeout=TIMEOUTS[method],
            connect_timeout=5.0,
            follow_redirects=False,
        )
        try:
            answer = await AsyncHTTPClient().fetch(request, raise_error=False)
        except (HTTPClientError, OSError) as error:
            self.log.warning("gpuspawner's service does not answer: %s", error)
            raise web.HTTPError(503, "The GPU service does not answer just now.") from None
        self.set_status(503 if answer.code == 599 else answer.code)
        self.set_header("Content-Type", "application/json")
        self.finish(answer.body or b"{}")

    def _service(self) -> str:
        """Where the service listens. Raises HTTPError 503."""
        name = self.settings["template_vars"].get("gpuspawner_service", "gpu")
        found = orm.Service.find(self.db, name=name)
        if found is None or found.server is None:
            raise web.HTTPError(503, "The GPU service does not run.")
        return str(Server(orm_server=found.server).url)
