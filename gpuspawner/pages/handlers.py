"""The Hub's pages of environments: open to whoever comes, and part of JupyterHub's own site.

They are JupyterHub handlers, so that its templates, its sign-in and its cookies go on working.
"""

from __future__ import annotations

from typing import Any

from jupyterhub.handlers.base import BaseHandler
from jupyterhub.user import User
from tornado import web
from tornado.http1connection import HTTP1Connection
from tornado.httputil import url_concat

from ..catalog import Catalog, Environment
from ..errors import GPUSpawnerError
from .cards import LONGEST, PAGE, Wanted
from .details import Details, logo_file, read_details
from .site import CatalogPages, Found, State

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


class Handler(DropsBody, BaseHandler):
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
        """Ask off the event loop; what the broker refuses becomes the page's sentence."""
        try:
            return await self.site.broker.read(work, *args)
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


class Environments(Handler):
    """All of them, as cards to search."""

    async def get(self) -> None:
        wanted, page = self._wanted(), self._page()
        found: Found = await self.ask(self.site.search, self.catalog(), self.groups, wanted, page)
        await self.show(
            "environments.html",
            cards=found.state.cards,
            overview=found.state.overview,
            look=found,
            wanted=wanted,
            link_to=self._link_to,
        )

    def _wanted(self) -> Wanted:
        gpu = self.get_argument("gpu", "")
        return Wanted(
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


class Live(Handler):
    """What is free now, for the pages that are open: JSON by slug, of the slugs asked for."""

    def get_content_type(self) -> str:
        return "application/json"

    async def get(self) -> None:
        slugs = set(self.get_argument("slugs", "").split(",")[:PAGE])
        some = [e for e in self.shown() if e.slug in slugs]
        state: State = await self.ask(self.site.state, some, self.groups)
        self.set_header("Cache-Control", "no-store")
        self.finish({card.slug: {"now": card.now, "at_once": card.at_once} for card in state.cards})


class OneEnvironment(Handler):
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


class Logo(Handler):
    """The logo of an environment, from beside the catalog."""

    @property
    def content_security_policy(self) -> str:
        return FILES

    async def get(self, slug: str) -> None:
        environment = self.environment(slug)
        try:
            content, kind = await self.site.broker.read(logo_file, self.catalog(), environment)
        except ValueError:
            raise web.HTTPError(404, "This environment has no logo.") from None
        self.set_header("Content-Type", kind)
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Cache-Control", "max-age=3600")
        self.finish(content)
