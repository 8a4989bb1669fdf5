"""The Hub's REST API, as far as the accounting service may use it.

Scopes: ``list:users`` to see whose servers there are, ``servers`` to see, start and stop them,
``read:groups`` to see who is in a group.
Nothing else: it starts only what a member asked for and waited for when the hub went down.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from datetime import datetime, timezone
from enum import Enum
from typing import Any
from urllib.parse import quote, urlencode

from dateutil.parser import isoparse
from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest, HTTPResponse

from ..core.errors import Unavailable
from ..leases.models import ServerRef
from ..leases.reconciliation import HubState

PAGE = 200
"""Users asked for at once; the Hub's own limit is the same unless an admin changed it."""

TIMEOUT = 30.0
"""Seconds. Stopping a server answers after the Hub's ``slow_stop_timeout``, which is 10."""

TAKEN_UP = 3.0
"""Seconds that a start is waited for: the Hub goes on with it after nobody listens any more."""

_PAGINATED = {"Accept": "application/jupyterhub-pagination+json"}


class Started(Enum):
    """What the Hub says of a start."""

    YES = "yes"
    """It is on its way, or was already."""
    NO_MEMBER = "no member"
    REFUSED = "refused"


class HubClient:
    """The Hub, through a service's token.

    Every method raises Unavailable when the Hub does not answer, or not as it should.
    """

    def __init__(self, api_url: str, token: str, ssl_context: ssl.SSLContext | None = None) -> None:
        self.api_url = api_url.rstrip("/")
        self._headers = {"Authorization": f"token {token}"}
        self._ssl = ssl_context

    async def servers(self) -> dict[ServerRef, HubState]:
        """Every server that runs, starts or stops.

        The list is fetched in pages: a server may be missing from it when others stopped
        meanwhile. Ask :meth:`server` before anything is done because of that.
        """
        found: dict[ServerRef, HubState] = {}
        offset = 0
        while True:
            query = urlencode({"state": "active", "offset": offset, "limit": PAGE})
            response = await self._ask("GET", f"/users?{query}", headers=_PAGINATED)
            page = _json(response)
            try:
                for user in page["items"]:
                    found |= _servers_of(user)
                following = page["_pagination"]["next"]
                if not following:
                    return found
                offset = int(following["offset"])
            except (KeyError, TypeError, ValueError) as error:
                raise _strange_answer() from error

    async def server(self, server: ServerRef) -> HubState | None:
        """One server; None when the Hub is sure that it has no such server."""
        response = await self._ask("GET", f"/users/{_quote(server.user)}", missing_is_answer=True)
        if response.code == 404:
            return None
        try:
            return _servers_of(_json(response)).get(server)
        except (KeyError, TypeError) as error:
            raise _strange_answer() from error

    async def last_activity(self, server: ServerRef) -> datetime | None:
        """When a server's kernels had output last, or its member did anything in it, as far as the
        Hub has heard; None when never, or when there is no such server."""
        response = await self._ask("GET", f"/users/{_quote(server.user)}", missing_is_answer=True)
        if response.code == 404:
            return None
        try:
            found = _json(response)["servers"].get(server.name, {}).get("last_activity")
            moment = isoparse(found) if found else None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _strange_answer() from error
        return moment if moment is None or moment.tzinfo else moment.replace(tzinfo=timezone.utc)

    async def has_member(self, user: str) -> bool:
        """Whether the Hub has a user of this name."""
        response = await self._ask("GET", f"/users/{_quote(user)}", missing_is_answer=True)
        return response.code != 404

    async def members_of(self, group: str) -> frozenset[str] | None:
        """The names of a group's members; None when the Hub has no such group."""
        response = await self._ask("GET", f"/groups/{_quote(group)}", missing_is_answer=True)
        if response.code == 404:
            return None
        try:
            return frozenset(str(name) for name in _json(response)["users"])
        except (KeyError, TypeError) as error:
            raise _strange_answer() from error

    async def stop_server(self, server: ServerRef) -> bool:
        """Ask for a server's stop. False when the Hub has no such server.

        A True promises no end: the stop may still be under way.
        """
        path = f"/users/{_quote(server.user)}/server"
        if server.name:
            path += f"s/{_quote(server.name)}"
        response = await self._ask("DELETE", path, missing_is_answer=True)
        return response.code != 404

    async def start_server(self, server: ServerRef, options: Mapping[str, Any] | None) -> Started:
        """Ask for a server's start, as its member did; None: with the options of its last one."""
        path = f"/users/{_quote(server.user)}/server"
        if server.name:
            path += f"s/{_quote(server.name)}"
        request = HTTPRequest(
            self.api_url + path,
            method="POST",
            headers={**self._headers, "Content-Type": "application/json"},
            body="" if options is None else json.dumps(dict(options)),
            request_timeout=TAKEN_UP,
            connect_timeout=TAKEN_UP,
            ssl_options=self._ssl,
        )
        try:
            await AsyncHTTPClient().fetch(request)
        except HTTPClientError as error:
            if error.code == 599:  # our own patience ended
                return Started.YES
            if error.code == 404:
                return Started.NO_MEMBER
            if error.code == 400:
                # It is pending or running already, unless the Hub refuses it for good.
                return Started.YES if await self.server(server) else Started.REFUSED
            if error.code in (403, 401):
                raise _not_allowed("POST", path) from None
            raise Unavailable(f"The Hub answered POST {path} with {error.code}.") from None
        except (OSError, ValueError) as error:
            raise Unavailable(f"The Hub at {self.api_url} does not answer ({error}).") from None
        return Started.YES

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        headers: dict[str, str] | None = None,
        missing_is_answer: bool = False,
    ) -> HTTPResponse:
        request = HTTPRequest(
            self.api_url + path,
            method=method,
            headers={**self._headers, **(headers or {})},
            request_timeout=TIMEOUT,
            connect_timeout=5.0,
            ssl_options=self._ssl,
        )
        try:
            return await AsyncHTTPClient().fetch(request)
        except HTTPClientError as error:
            if error.code == 404 and missing_is_answer and error.response is not None:
                return error.response
            if error.code == 403:
                raise _not_allowed(method, path) from None
            raise Unavailable(
                f"The Hub answered {method} {path.partition('?')[0]} with {error.code} "
                f"({error.message}). It is asked again at the next round."
            ) from None
        except (OSError, ValueError) as error:
            raise Unavailable(
                f"The Hub at {self.api_url} does not answer ({error}). It is asked again at the "
                "next round."
            ) from None


def _servers_of(user: dict[str, Any]) -> dict[ServerRef, HubState]:
    return {
        ServerRef(user["name"], name): HubState.READY if server["ready"] else HubState.PENDING
        for name, server in user["servers"].items()
    }


def _json(response: HTTPResponse) -> Any:
    try:
        return json.loads(response.body)
    except ValueError as error:
        raise _strange_answer() from error


def _not_allowed(method: str, path: str) -> Unavailable:
    return Unavailable(
        f"The Hub does not let this service {method} {path.partition('?')[0]}. Give it the scopes "
        "list:users, read:groups and servers (gpuspawner.add_services does), and restart the Hub."
    )


def _strange_answer() -> Unavailable:
    return Unavailable(
        "The Hub's list of servers is not in the form that this version knows. Use JupyterHub 4 "
        "or newer, and check that the service's role holds servers."
    )


def _quote(name: str) -> str:
    return quote(name, safe="")
