"""The way from a server to our service: ``/hub/api/gpuspawner/leases/...``.

A server in a container reaches the hub's API and nothing else of this machine. What it asks about
itself is handed to the service with the token that it came with, and the service decides: this
adds no right. Cookies, bodies and whatever else came with it stay here.
"""

from __future__ import annotations

import re

from jupyterhub import orm
from jupyterhub.apihandlers.base import APIHandler
from jupyterhub.objects import Server
from tornado import web
from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest

from .handlers import DropsBody

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
