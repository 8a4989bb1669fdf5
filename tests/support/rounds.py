"""What tests of the accounting rounds share: a scripted Hub, services, a round."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timezone
from typing import Any
from urllib.parse import unquote

from tornado import web
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port

from gpuspawner.core.units import MICRO
from gpuspawner.engines.base import Engine
from gpuspawner.leases.models import Lease, Request, ServerRef
from gpuspawner.service.duties import CreditDuty
from gpuspawner.service.hub_client import HubClient
from gpuspawner.service.worker import Tick
from gpuspawner.services import Services
from tests.support.brokers import Clock, make_services

START = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
RATE = 4 * MICRO
"""Of one A100, microcredits an hour."""

GRACE = 300


class ScriptedHub:
    """The three calls of the Hub's REST API that the service makes, with their failures."""

    def __init__(self) -> None:
        self.users: dict[str, dict[str, dict[str, Any]]] = {}
        """Servers by user and name, as the Hub's JSON has them."""
        self.hidden: set[str] = set()
        """Users that the list misses, as a list in pages may."""
        self.status: int | None = None
        """What every call is answered with instead."""
        self.body: str | None = None
        self.stopped: list[str] = []
        self.asked: list[str] = []
        self.token = "of the service"
        self.url = ""

    def has(self, *servers: ServerRef, ready: bool = True) -> None:
        """From now on exactly these servers are there."""
        self.users = {}
        for server in servers:
            self.users.setdefault(server.user, {})[server.name] = {"ready": ready}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ScriptedHub]:
        """Answer on a port of this machine."""
        server = HTTPServer(self.app())
        listening, port = bind_unused_port()
        server.add_socket(listening)
        self.url = f"http://127.0.0.1:{port}/hub/api"
        try:
            yield self
        finally:
            server.stop()

    def client(self) -> HubClient:
        """What the service asks it through."""
        return HubClient(self.url, self.token)

    def app(self) -> web.Application:
        """The pages that answer."""
        hub = self

        class Call(web.RequestHandler):
            def prepare(self) -> None:
                hub.asked.append(f"{self.request.method} {self.request.uri}")
                if self.request.headers["Authorization"] != f"token {hub.token}":
                    raise web.HTTPError(403)
                if hub.status:
                    self.set_status(hub.status)
                    self.finish(hub.body or "")

        class Users(Call):
            def get(self) -> None:
                assert self.get_query_argument("state") == "active"
                assert "jupyterhub-pagination" in self.request.headers["Accept"]
                offset, limit = (int(self.get_query_argument(n)) for n in ("offset", "limit"))
                names = [name for name in hub.users if name not in hub.hidden]
                items = [
                    {"name": name, "servers": hub.users[name]}
                    for name in names[offset : offset + limit]
                ]
                following = {"offset": offset + limit} if offset + limit < len(names) else None
                self.finish({"items": items, "_pagination": {"next": following}})

        class User(Call):
            def get(self, name: str) -> None:
                name = unquote(name)
                if name not in hub.users:
                    raise web.HTTPError(404)
                self.finish({"name": name, "servers": hub.users[name]})

        class Server(Call):
            def delete(self, name: str, server: str = "") -> None:
                if unquote(name) not in hub.users:
                    raise web.HTTPError(404)
                hub.stopped.append(f"{unquote(name)}/{unquote(server)}")
                self.set_status(202)

        return web.Application(
            [
                ("/hub/api/users", Users),
                ("/hub/api/users/([^/]+)", User),
                ("/hub/api/users/([^/]+)/server", Server),
                ("/hub/api/users/([^/]+)/servers/([^/]+)", Server),
            ]
        )


SITE: dict[str, Any] = {
    "device_source": "simulated:2xA100-80GB,1xT4",
    "gpu_rates": {"*": 1, "A100": 4},
    "opening_grant": 1,
    "grace_seconds": GRACE,
}
"""Settings: two A100 at 4 credits an hour and a T4 at 1; accounts open with 1 credit."""


def open_services(database_url: str, clock: Clock, **settings: Any) -> Services:
    """Services of :data:`SITE`. Close its store."""
    return make_services(clock, database_url=database_url, **{**SITE, **settings})


def make_tick(services: Services, hub: ScriptedHub, *engines: Engine, **settings: Any) -> Tick:
    """The service's rounds, without the service."""
    return Tick(
        services=services,
        hub=hub.client(),
        engines={engine.name: engine for engine in engines},
        log=logging.getLogger("tick"),
        **settings,
    )


def make_credits(services: Services, hub: ScriptedHub, **settings: Any) -> CreditDuty:
    """The service's part in accounts that run dry, without the service."""
    return CreditDuty(make_tick(services, hub), **{"warn_minutes": (), **settings})


def running(services: Services, user: str, devices: int = 1, engine: str = "local") -> Lease:
    """A running lease of A100s (or of no device)."""
    request = Request(devices=devices, model="A100" if devices else None)
    return services.leases.confirm(
        services.leases.grant(ServerRef(user), request, engine=engine).id
    )


def told(records: list[logging.LogRecord]) -> list[str]:
    """What the service logged, of all that was logged."""
    return [record.getMessage() for record in records if record.name == "tick"]
