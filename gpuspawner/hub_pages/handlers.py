"""The Hub's pages that are ours, and the relay from a server to gpuspawner's service.

The pages are JupyterHub handlers, so that they use its templates, sign-in and cookies.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from jupyterhub import orm
from jupyterhub.apihandlers.base import APIHandler
from jupyterhub.handlers.base import BaseHandler
from jupyterhub.handlers.pages import RootHandler
from jupyterhub.objects import Server
from jupyterhub.traitlets import ByteSpecification
from jupyterhub.user import User
from jupyterhub.utils import url_escape_path
from markupsafe import Markup
from tornado import web
from tornado.http1connection import HTTP1Connection
from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest, HTTPResponse
from tornado.httputil import url_concat
from traitlets import Bool
from traitlets.config import Configurable

from ..catalog.loader import Catalog, watched
from ..catalog.models import DeviceLimits, Environment
from ..core.errors import GPUSpawnerError, RequestTooLarge
from ..core.units import format_bytes, format_credits, format_price
from ..devices.snapshots import ModelCount, Overview
from ..leases.host_resources import NOTHING, HostAmount
from ..ledger.models import Account
from ..queue.positions import Outlook
from ..runs.file_views import NEXT
from ..services import Services, hub_services
from ..web import view_models
from ..web.frame import STATIC
from ..web.pages import TEMPLATES
from .cards import (
    LONGEST,
    PAGE,
    Card,
    CardFilter,
    frameworks_of,
    logo_file,
    make_cards,
    read_details,
    usual_request,
)
from .prices import PriceList

T = TypeVar("T")

KEY = "gpuspawner_pages"

FRESH = 1.0
"""Seconds for which an overview of the devices is reused for everybody."""


@dataclass(frozen=True, slots=True)
class State:
    """The devices at one moment, and the cards of some environments."""

    overview: Overview
    cards: list[Card]


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads a page; without a sign-in, somebody new."""

    name: str
    groups: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundEnvironments:
    """One page of the results of a search."""

    state: State
    found: int
    total: int
    """Number of environments that the reader may see."""
    frameworks: list[str]
    """The frameworks in all environments that the reader may see."""
    page: int
    pages: int


class CatalogPages(Configurable):
    """Settings and data of the pages ``/hub/environments``."""

    public = Bool(
        True,
        config=True,
        help="""
        Show environments, prices and free GPUs to people who have not signed in. On by default. If
        it is off, they must sign in first.

        These pages never name a member. Example::

            c.CatalogPages.public = False
        """,
    )

    settings: MutableMapping[str, Any]
    _seen: tuple[float, Overview | None] = (0.0, None)

    @classmethod
    def of(cls, settings: MutableMapping[str, Any]) -> CatalogPages:
        """Return the hub's only instance, from the settings of a handler."""
        # Tornado's application copies its settings. Spawners share the Hub's own dictionary.
        shared: MutableMapping[str, Any] = settings["users"].settings
        found: CatalogPages = shared.get(KEY) or cls(config=shared["config"])
        shared[KEY], found.settings = found, shared
        return found

    @property
    def services(self) -> Services:
        """The hub's services, which its spawners use too."""
        return hub_services(self.settings, self.config, self.settings["log"])

    async def refresh_catalog(self) -> None:
        """Reload the catalog's file off the event loop if it changed."""
        if name := self.configured("catalog"):
            await watched(self.settings, name, self.settings["log"]).refresh()

    def catalog(self) -> Catalog:
        """Return the current catalog or the last valid one. Raises ConfigError without any."""
        name = self.configured("catalog")
        if not name:
            return Catalog.single(devices=DeviceLimits(default=1, max=1024))
        return watched(self.settings, name, self.settings["log"]).current()

    def catalog_problem(self) -> str:
        """Return why the catalog's file is refused just now; empty if it is valid."""
        name = self.configured("catalog")
        return watched(self.settings, name, self.settings["log"]).problem if name else ""

    def search(
        self, catalog: Catalog, reader: Reader, wanted: CardFilter, page: int
    ) -> FoundEnvironments:
        """Return one page of the results of a search; the first page is 1. Reads the store."""
        everything = list(catalog.visible_to(reader.groups))
        found = [e for e in everything if wanted.takes(e)] if wanted else everything
        if wanted.at_once:
            outlooks = self._outlooks(found, reader)
            found = [e for e in found if outlooks[e.slug].at_once]
        pages = max(1, math.ceil(len(found) / PAGE))
        page = min(page, pages)
        return FoundEnvironments(
            state=self.state(found[PAGE * (page - 1) : PAGE * page], reader),
            found=len(found),
            total=len(everything),
            frameworks=frameworks_of(everything),
            page=page,
            pages=pages,
        )

    def state(self, some: Sequence[Environment], reader: Reader) -> State:
        """Return the cards of environments for a reader. Reads the store."""
        now = self.services.clock()
        overview = self._overview().usable_by(reader.groups, now)
        outlooks = self._outlooks(some, reader)
        url = f"{self.settings['hub'].base_url}environments"
        cards = make_cards(some, overview, outlooks, now, url, self.usual_guarantee())
        return State(overview, cards)

    def usual_guarantee(self) -> HostAmount:
        """Return what the spawner's traits guarantee where an environment guarantees nothing.

        As configured for everybody: readers have no spawner, whose traits their groups may change.
        Nothing if the host has no budget.
        """
        if self.services.leases.budget is None:
            return NOTHING
        memory, cpus = (self.configured(name) or 0 for name in ("mem_guarantee", "cpu_guarantee"))
        return HostAmount.of(ByteSpecification().validate(None, memory), float(cpus))

    def _outlooks(self, some: Sequence[Environment], reader: Reader) -> dict[str, Outlook]:
        guaranteed = self.usual_guarantee()
        requests = {e.slug: usual_request(e, guaranteed) for e in some}
        return self.services.positions.outlooks(requests, reader.name, reader.groups)

    def _overview(self) -> Overview:
        """Return an overview at most ``FRESH`` seconds old, because anybody may ask at any rate."""
        since, known = self._seen
        if known is None or time.monotonic() - since > FRESH:
            known = self.services.monitoring.overview()
            self._seen = (time.monotonic(), known)
        return known

    def configured(self, trait: str) -> Any:
        """Return the configured value of a spawner trait, most derived class first; else empty."""
        cls = self.settings["spawner_class"]
        sections = (c.__name__ for c in cls.__mro__ if c.__name__ in self.config)
        return next((self.config[s][trait] for s in sections if trait in self.config[s]), "")


FILES = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
"""Content security policy of files beside the catalog, because an SVG can contain scripts."""

BODY_BYTES = 64 * 1024
"""Maximum size of a request's body. If it is larger, the connection is closed."""
DISCARDED_BYTES = 8 * 1024 * 1024
"""Maximum size of a body that is read only to answer that it is too large."""
BODY_SECONDS = 30.0


@web.stream_request_body
class DropsBody(web.RequestHandler):
    """A handler of the Hub without a request body: any body is discarded as it arrives."""

    def set_default_headers(self) -> None:
        """Close the connection after a request with a body."""
        super().set_default_headers()
        # A refusal is sent before the body is read, and then the connection is closed, so that no
        # proxy sends another request on it.
        if {"Content-Length", "Transfer-Encoding"} & set(self.request.headers):
            self.set_header("Connection", "close")

    async def prepare(self) -> None:
        """Limit the body before any of it is read."""
        connection = self.request.connection
        if isinstance(connection, HTTP1Connection):
            connection.set_max_body_size(BODY_BYTES)
            connection.set_body_timeout(BODY_SECONDS)
        if (prepared := super().prepare()) is not None:
            await prepared

    def data_received(self, chunk: bytes) -> None:
        """Discard a part of the body."""


class HubPageHandler(DropsBody, BaseHandler):
    """The common base of these pages."""

    async def prepare(self) -> None:
        """Reload a changed catalog. Redirect to the sign-in if it is needed to see the page."""
        await super().prepare()
        await self.site.refresh_catalog()
        if not self._finished and not self.site.public and self.current_user is None:
            self.redirect(url_concat(self.get_login_url(), {"next": self.request.uri}))

    @property
    def site(self) -> CatalogPages:
        """The hub's settings and data for these pages."""
        return CatalogPages.of(self.settings)

    @property
    def groups(self) -> frozenset[str]:
        """The reader's groups; empty for a service or without a sign-in."""
        return frozenset(group.name for group in getattr(self.current_user, "groups", ()))

    @property
    def reader(self) -> Reader:
        """The reader, who may be nobody in particular."""
        return Reader(getattr(self.current_user, "name", ""), self.groups)

    @property
    def running(self) -> bool:
        """True if the reader's default server is running. Then a launch does not start another."""
        user = self.current_user
        known = user.orm_user.orm_spawners.get("") if isinstance(user, User) else None
        return bool(known and known.server)

    def catalog(self) -> Catalog:
        """Return the catalog. Raises HTTPError 503 if it has never been valid."""
        try:
            return self.site.catalog()
        except GPUSpawnerError as error:
            self.log.error("The catalog cannot be shown: %s", error.message)
            sentence = "The environments cannot be shown right now. Try again in a moment."
            raise web.HTTPError(503, sentence) from None

    def shown(self) -> list[Environment]:
        """Return the environments that the reader may see."""
        return list(self.catalog().visible_to(self.groups))

    async def ask(self, work: Callable[..., T], *args: Any) -> T:
        """Run ``work`` off the event loop. An error of the services becomes the page's message."""
        try:
            return await self.site.services.read(work, *args)
        except GPUSpawnerError as error:
            raise web.HTTPError(error.status_code, "%s", error.message) from None

    async def show(self, template: str, **values: Any) -> None:
        """Render a template and send it as the page."""
        page = await self.render_template(
            template,
            no_spawner_check=True,  # otherwise the navigation bar creates a spawner
            environments_url=f"{self.hub.base_url}environments",
            running=self.running,
            **values,
        )
        self.set_header("Cache-Control", "no-store")
        self.finish(page)

    def environment(self, slug: str) -> Environment:
        """Return an environment that the reader may see. Raises HTTPError 404."""
        found = next((e for e in self.shown() if e.slug == slug), None)
        if found is None:
            who = "" if self.current_user else " Some are shown only after signing in."
            raise web.HTTPError(404, "There is no environment %r on this hub.%s", slug[:60], who)
        return found


class Environments(HubPageHandler):
    """The page of all environments, as cards with a search."""

    async def get(self) -> None:
        """Show one page of the results."""
        wanted, page = self._wanted(), self._page()
        found = await self.ask(self.site.search, self.catalog(), self.reader, wanted, page)
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
        names = ("q", "gpu", "framework", "now")
        query = {n: value for n in names if (value := self.get_argument(n, ""))}
        return url_concat(self.request.path, {**query, "page": str(page)})


class LiveEnvironments(HubPageHandler):
    """Current availability as JSON by slug, with which open pages refresh their cards."""

    def get_content_type(self) -> str:
        """Return the type of JSON, because the Hub's handlers send HTML by default."""
        return "application/json"

    async def get(self) -> None:
        """Send the availability of the environments in the argument ``slugs``."""
        slugs = set(self.get_argument("slugs", "").split(",")[:PAGE])
        some = [e for e in self.shown() if e.slug in slugs]
        state = await self.ask(self.site.state, some, self.reader)
        self.set_header("Cache-Control", "no-store")
        self.finish({card.slug: {"now": card.now, "at_once": card.at_once} for card in state.cards})


class EnvironmentPage(HubPageHandler):
    """The page of one environment."""

    async def get(self, slug: str) -> None:
        """Show the environment with this slug."""
        environment, groups = self.environment(slug), self.groups
        state = await self.ask(self.site.state, [environment], self.reader)
        usual = {name: self.site.configured(name) for name in ("mem_limit", "cpu_limit")}
        guaranteed = self.site.usual_guarantee()
        details = await self.ask(
            read_details, self.catalog(), environment, groups, usual, guaranteed
        )
        for trouble in details.troubles:
            self.log.warning("The catalog: %s", trouble)
        now = self.site.services.clock()
        link = url_concat(f"{self.hub.base_url}spawn", {"opt-environment": environment.slug})
        await self.show(
            "environment.html",
            card=state.cards[0],
            overview=state.overview,
            details=details,
            models=PriceList(state.overview, [environment], now).of_models(environment),
            launch=link,
            shared=f"{self.request.protocol}://{self.request.host}{link}",
        )


class StartWithoutGPU(HubPageHandler):
    """The button of the pending page that leaves the queue and starts without a GPU."""

    @web.authenticated
    async def post(self, server_name: str) -> None:
        """Start the user's own server, if it waits, and go back to the pending page."""
        user = self.current_user
        if not isinstance(user, User) or server_name not in user.spawners:
            raise web.HTTPError(404, "You have no such server.")
        try:
            await user.spawners[server_name].start_without_gpu()
        except GPUSpawnerError as error:
            raise web.HTTPError(error.status_code, "%s", error.message) from None
        name = f"/{url_escape_path(server_name)}" if server_name else ""
        self.redirect(f"{self.hub.base_url}spawn-pending/{user.escaped_name}{name}", status=303)


class Logo(HubPageHandler):
    """The logo of an environment, from a file beside the catalog."""

    @property
    def content_security_policy(self) -> str:
        """A policy without scripts."""
        return FILES

    async def get(self, slug: str) -> None:
        """Send the logo."""
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
    "GET": re.compile(
        "environments|leases/[0-9a-f]{1,64}/now|runs(/[0-9a-z-]{1,64}(/log|/files)?)?"
        "|runs/-/schedules(/[0-9a-z-]{1,64})?|sweeps/[0-9a-z-]{1,60}"
    ),
    "POST": re.compile(
        "leases/[0-9a-f]{1,64}/(snooze|extend|end)|(runs|sweeps)(/-/quote)?"
        "|runs/-/schedules(/[0-9a-z-]{1,64}/run)?|sweeps/[0-9a-z-]{1,60}/again"
    ),
    "PATCH": re.compile("runs/-/schedules/[0-9a-z-]{1,64}"),
    "DELETE": re.compile("(runs|sweeps|runs/-/schedules)/[0-9a-z-]{1,64}"),
}
"""Paths of the service that the relay forwards, by method."""

JSON = "application/json"

FOLLOW_PAUSE, FOLLOW_SECONDS = 2.0, 3600.0
"""Seconds between two questions for a log that is followed, and until that ends."""

TIMEOUTS = {"GET": 8.0, "POST": 20.0, "PATCH": 20.0, "DELETE": 20.0}
"""Timeouts in seconds. A stop is answered after the Hub's ``slow_stop_timeout`` of 10."""


class ServiceRelay(DropsBody, APIHandler):
    """Forwards a server's requests about itself, for :data:`PATHS`, to the service.

    A server in a container can only reach the hub's API on this machine. A request needs a token,
    by which the service authorizes it: the relay grants no rights. It forwards no cookies or other
    headers, and the query and body of requests about runs alone.
    """

    _body = b""
    _received_bytes = 0
    _gone: asyncio.Event | None = None

    async def prepare(self) -> None:
        """Let a server with a valid token send more than is accepted.

        It can then read that this is too much: while it still sends, it would only see the
        connection break.
        """
        await super().prepare()
        connection = self.request.connection
        if isinstance(connection, HTTP1Connection) and self.current_user is not None:
            connection.set_max_body_size(DISCARDED_BYTES)

    def on_connection_close(self) -> None:
        """Stop following a log."""
        super().on_connection_close()
        if self._gone is not None:
            self._gone.set()

    def data_received(self, chunk: bytes) -> None:
        """Keep a part of the body, as long as it is not too large."""
        self._received_bytes += len(chunk)
        self._body = self._body + chunk if self._received_bytes <= BODY_BYTES else b""

    async def get(self, path: str) -> None:
        """Forward a server's query (GET) or action (POST, PATCH, DELETE)."""
        method = str(self.request.method)
        if not PATHS[method].fullmatch(path):
            raise web.HTTPError(404)
        if self.current_user is None or not self.get_auth_token():
            raise web.HTTPError(403)
        if self._received_bytes > BODY_BYTES:
            self._refuse(RequestTooLarge(limit=format_bytes(BODY_BYTES)))
            return
        of_runs = path.startswith(("runs", "sweeps"))
        query = f"?{self.request.query}" if of_runs and self.request.query else ""
        if path.endswith("/log") and self.get_query_argument("follow", "") == "1":
            await self._follow(path)
            return
        answer = await self._ask(path + query, self._body if of_runs else b"{}")
        self._begin(answer)
        self.finish(answer.body)

    post = patch = delete = get

    def _refuse(self, error: GPUSpawnerError) -> None:
        """Answer with an error in the words of the service."""
        self.set_status(error.status_code)
        self.set_header("Content-Type", JSON)
        self.finish({"error": error.reason, "message": error.message})

    async def _follow(self, path: str) -> None:
        """Send a log until its run ends or the client goes away, by one question after another."""
        self._gone = asyncio.Event()
        offset, until = self.get_query_argument("offset", "0"), time.monotonic() + FOLLOW_SECONDS
        while True:
            answer = await self._ask(url_concat(path, {"offset": offset}))
            if not self._headers_written:
                self._begin(answer)
            elif answer.code != 200:
                return
            self.write(answer.body)
            await self.flush()
            last, offset = offset, answer.headers.get(NEXT, "")
            if not offset or time.monotonic() > until:
                return
            if offset == last:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._gone.wait(), FOLLOW_PAUSE)
            if self._gone.is_set():
                return

    async def _ask(self, path: str, body: bytes = b"") -> HTTPResponse:
        """Return the service's answer. Raises HTTPError 503."""
        method = str(self.request.method)
        request = HTTPRequest(
            f"{self._service()}api/{path}",
            method=method,
            headers={"Authorization": f"token {self.get_auth_token()}"},
            body=body if method in ("POST", "PATCH") else None,
            request_timeout=TIMEOUTS[method],
            connect_timeout=5.0,
            follow_redirects=False,
        )
        try:
            return await AsyncHTTPClient().fetch(request, raise_error=False)
        except (HTTPClientError, OSError) as error:
            self.log.warning("gpuspawner's service is not responding: %s", error)
            raise web.HTTPError(503, "The GPU service is not responding.") from None

    def _begin(self, answer: HTTPResponse) -> None:
        """Set the status, and the headers that matter: of a log, its type and the next offset.

        Raises HTTPError 503 if there was no answer in time.
        """
        if answer.code == 599:
            raise web.HTTPError(503, "The GPU service is not responding.")
        self.set_status(answer.code)
        is_text = answer.headers.get("Content-Type", "").startswith("text/plain")
        self.set_header("Content-Type", answer.headers["Content-Type"] if is_text else JSON)
        self.set_header("X-Content-Type-Options", "nosniff")
        if NEXT in answer.headers:
            self.set_header(NEXT, answer.headers[NEXT])

    def _service(self) -> str:
        """Return the URL of the service. Raises HTTPError 503 if it is not registered."""
        name = self.settings["template_vars"].get("gpuspawner_service", "gpu")
        found = orm.Service.find(self.db, name=name)
        if found is None or found.server is None:
            raise web.HTTPError(503, "The GPU service does not run.")
        return str(Server(orm_server=found.server).url)


class OwnFiles(web.StaticFileHandler):
    """Style and scripts of ours on the Hub's pages, which do not wait for the service."""

    def initialize(self) -> None:  # type: ignore[override]
        """Serve the files that the service has too."""
        super().initialize(str(STATIC))


class Notices(HubPageHandler):
    """The member's newest notices as JSON, for browser notifications on every page."""

    async def get(self) -> None:
        """Send them. Raises HTTPError 403 if nobody has signed in."""
        if not isinstance(self.current_user, User):
            raise web.HTTPError(403)
        services = self.site.services
        told = await self.ask(services.notifications.notices_of, self.current_user.name)
        self.set_header("Cache-Control", "no-store")
        self.finish(
            {
                "as_of": services.clock().isoformat(),
                "notices": [
                    {"title": some.title, "body": some.body, "at": some.at.isoformat()}
                    for some in told
                ],
            }
        )


WELCOMED_KEY = "gpuspawner_welcomed"

MODELS = 4
"""Maximum number of GPU models on this page; the environments' pages show the other ones."""


def front_door(handler: BaseHandler) -> str:
    """Return the Hub's ``default_url``: the welcome page for a user who may be new, else empty.

    With an empty URL the Hub behaves as usual. This function does not ask the database, because
    that would block the Hub: the page itself checks if the user is new, and the process remembers
    the result.
    """
    user = handler.current_user
    if user is None and not isinstance(handler, RootHandler):
        # They have just signed in. Their cookie identifies them from the next request on.
        return str(handler.hub.base_url)
    if not isinstance(user, User) or user.name in _known(handler.settings):
        return ""
    return f"{handler.hub.base_url}welcome/first"


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a GPU of one model, and how long a balance pays for it."""

    model: str
    rate: str
    """Credits per hour, formatted."""
    hours: int | None
    """Full hours; None if the GPU is free of charge."""


class Welcome(HubPageHandler):
    """The page ``/hub/welcome``."""

    @web.authenticated
    async def get(self) -> None:
        """Show the page, even to members who have seen it before."""
        if not isinstance(self.current_user, User):
            raise web.HTTPError(403, "This page is for members.")
        await self.show_it(self.current_user.name)

    async def show_it(self, user: str) -> None:
        """Send the page with the member's balance and the prices."""
        services = self.site.services
        account, models = await self.ask(_known_of, services, user)
        await self.show(
            "welcome.html",
            balance=format_credits(account.balance),
            prices=prices(account, models),
            more_prices=len(models) > MODELS,
            claim_minutes=services.settings.queue.claim_minutes,
            place=_place(self.site, self.settings["spawner_class"]),
            folders=bool(services.settings.folders.source),
        )


class Glossary(HubPageHandler):
    """The page ``/hub/glossary``: what the words on the pages mean."""

    async def get(self) -> None:
        """Show the page."""
        await self.show("glossary.html")


class FirstWelcome(Welcome):
    """The page ``/hub/welcome/first``, which redirects members who have seen it."""

    @web.authenticated
    async def get(self) -> None:
        """Show the page and record it, or redirect to the next page."""
        user = self.current_user
        name = user.name if isinstance(user, User) else ""
        if not name or not await self._is_due(name):
            _known(self.settings).add(name)
            self.redirect(self.get_next_url(user))
            return
        await self.show_it(name)
        _known(self.settings).add(name)
        services = self.site.services
        try:
            await services.run(services.members.welcomed, name)
        except GPUSpawnerError as error:  # they see it again after the hub restarts
            self.log.warning(
                "Could not record that %r saw the welcome page: %s", name, error.message
            )
        await self._open_workspace(user)

    async def _open_workspace(self, user: User) -> None:
        """Create the workspace ahead of the first start. The page has already been sent."""
        if open_workspace := getattr(user.spawner, "open_workspace", None):
            try:
                await open_workspace()
            except Exception as error:  # of an engine's library; the first start reports it too
                self.log.warning("The workspace of %r is not created yet: %s", user.name, error)

    async def _is_due(self, user: str) -> bool:
        """Return True if a member has not seen the page; False if the store cannot tell."""
        services = self.site.services
        try:
            return await services.read(services.members.welcome_due, user)
        except GPUSpawnerError as error:
            self.log.warning("Cannot tell if %r is new: %s", user, error.message)
            return False


def prices(account: Account, models: list[ModelCount]) -> list[Price]:
    """Return the prices of the cheapest GPU models, and how long the balance pays for each."""
    rates: dict[str, int] = {}
    for each in models:
        rates[each.model] = min(each.rate, rates.get(each.model, each.rate))
    cheapest = sorted(rates.items(), key=lambda item: (item[1], item[0]))[:MODELS]
    available = max(0, account.available)
    return [
        Price(model, format_price(rate), available // rate if rate else None)
        for model, rate in cheapest
    ]


def _place(site: CatalogPages, spawner: type[Any]) -> str:
    """Return the folder whose files are kept; empty if none is configured."""
    traits = spawner.class_traits()
    kept = [name for name in ("workspace", "volumes") if name in traits]
    if not any(site.configured(name) or traits[name].default_value for name in kept):
        return ""
    target = str(site.configured("workspace_target") or "work")
    return "work" if target.endswith("/work") else target


def _known_of(services: Services, user: str) -> tuple[Account, list[ModelCount]]:
    """Return the member's account, opened if the sign-in failed to, and the GPU models."""
    (account,) = services.ledger.less_due([services.ledger.open_account(user)])
    return account, list(services.monitoring.overview().models)


def _known(settings: MutableMapping[str, Any]) -> set[str]:
    """Return the names of users who need no welcome, as far as this process knows."""
    found: set[str] = settings["users"].settings.setdefault(WELCOMED_KEY, set())
    return found


# The member's dashboard on the Hub's home page.

RECENT = timedelta(days=1)
"""For how long the page says why the last session was stopped."""

NEWEST_NOTICES = 3
"""How many notices it shows."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """What the template of the page shows."""

    html: str = ""
    """Markup, once there is something to show."""
    queued: bool = False
    """True if the default server waits in the queue."""


def dashboard_of(user: User | None) -> Callable[[str, str], Awaitable[Dashboard]]:
    """Return what home.html calls: the Hub computes a template's variables for every page."""

    async def dashboard(service_url: str, hub_url: str) -> Dashboard:
        return await _dashboard(user, service_url, hub_url) if user else Dashboard()

    return dashboard


async def _dashboard(user: User, service_url: str, hub_url: str) -> Dashboard:
    """Return what runs or waits, what it costs, and what ended.

    Only a sentence if the store is not responding, and nothing if the Hub's spawner is not one of
    ours. ``service_url`` is such as ``/services/gpu/``, ``hub_url`` as ``/hub/``.
    """
    spawner = user.spawner
    services = getattr(spawner, "services", None)
    if not isinstance(services, Services):
        return Dashboard()
    try:
        seen = await services.read(view_models.look, services, user.name, spawner.group_names, ())
        told = await services.read(services.notifications.notices_of, user.name)
    except GPUSpawnerError as error:
        spawner.log.warning("The home page of %s has no dashboard: %s", user.name, error)
        said = Markup('<p class="alert alert-warning" role="status">{}</p>')
        return Dashboard(said.format(error.message))
    last = seen.mine.sessions[0].lease if seen.mine.sessions else None
    is_recent = last and last.ended_at and seen.mine.now - last.ended_at < RECENT
    text = TEMPLATES.get_template("dashboard.html").render(
        prefix=service_url,
        hub=hub_url,
        user=user.escaped_name,
        mine=seen.mine,
        tickets=seen.tickets,
        curves=seen.curves,
        ended=seen.ended,
        notices=told[:NEWEST_NOTICES],
        stopped=last if last and last.outcome and is_recent else None,
    )
    queued = any(place and not ticket.server.name for ticket, place in seen.tickets.waiting)
    return Dashboard(Markup(text), queued)  # every value in it is escaped  # nosec B704
