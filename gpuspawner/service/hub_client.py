"""The part of the Hub's REST API that the accounting service uses, with ACCOUNTING_SCOPES."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from enum import Enum
from typing import Any
from urllib.parse import quote, urlencode

from dateutil.parser import isoparse
from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest, HTTPResponse

from ..core.errors import GPUSpawnerError, RefusedByHub, Unavailable
from ..leases.models import ServerRef
from ..leases.reconciliation import HubState

PAGE = 200
"""Users per request; the Hub's own limit is the same unless an admin changed it."""

TIMEOUT = 30.0
"""Seconds. Stopping a server answers after the Hub's ``slow_stop_timeout``, which is 10."""

REGISTRY_TIMEOUT = 70.0
"""Seconds. The Hub itself waits up to 30 for a registry, and also reads the catalog's file."""

TAKEN_UP = 3.0
"""Seconds to wait for a start: the Hub continues it even if nobody listens any more."""

_PAGINATED = {"Accept": "application/jupyterhub-pagination+json"}


class StartAnswer(Enum):
    """The Hub's answer to a start."""

    YES = "yes"
    """It is starting, or was already."""
    NO_MEMBER = "no member"
    REFUSED = "refused"


class HubClient:
    """The Hub's API for a service. Raises Unavailable if an answer is missing or unexpected."""

    def __init__(self, api_url: str, token: str, ssl_context: ssl.SSLContext | None = None) -> None:
        self.api_url = api_url.rstrip("/")
        self._headers = {"Authorization": f"token {token}"}
        self._ssl = ssl_context

    async def servers(self) -> dict[ServerRef, HubState]:
        """Return every server that runs, starts or stops.

        The list is fetched in pages: a server may be missing if others stopped meanwhile. Ask
        :meth:`server` before acting on that.
        """
        found: dict[ServerRef, HubState] = {}
        offset = 0
        while True:
            query = urlencode({"state": "active", "offset": offset, "limit": PAGE})
            response = await self._ask("GET", f"/users?{query}", headers=_PAGINATED)
            with _known_form():
                page = json.loads(response.body)
                for user in page["items"]:
                    found |= _servers_of(user)
                following = page["_pagination"]["next"]
                if not following:
                    return found
                offset = int(following["offset"])

    async def server(self, server: ServerRef) -> HubState | None:
        """Return a server's state; None if the Hub is sure that it does not exist."""
        response = await self._ask_if_known("GET", f"/users/{_quote(server.user)}")
        if response is None:
            return None
        with _known_form():
            return _servers_of(json.loads(response.body)).get(server)

    async def last_activity(self, server: ServerRef) -> datetime | None:
        """Return when the Hub last saw activity or output of a server; None if never."""
        response = await self._ask_if_known("GET", f"/users/{_quote(server.user)}")
        if response is None:
            return None
        with _known_form():
            servers = json.loads(response.body)["servers"]
            found = servers.get(server.name, {}).get("last_activity")
            moment = isoparse(found) if found else None
        return moment if moment is None or moment.tzinfo else moment.replace(tzinfo=timezone.utc)

    async def has_member(self, user: str) -> bool:
        """Return True if the Hub has a user with this name."""
        return await self._ask_if_known("GET", f"/users/{_quote(user)}") is not None

    async def members_of(self, group: str) -> frozenset[str] | None:
        """Return the names of a group's members; None if the Hub has no such group."""
        response = await self._ask_if_known("GET", f"/groups/{_quote(group)}")
        if response is None:
            return None
        with _known_form():
            return frozenset(str(name) for name in json.loads(response.body)["users"])

    async def stop_server(self, server: ServerRef) -> bool:
        """Request a server's stop, which may take a while. False if the Hub has no such server."""
        return await self._ask_if_known("DELETE", _path_of(server)) is not None

    async def starting_runs(self) -> frozenset[ServerRef]:
        """Have the Hub handle the waiting runs, and return those that it is about to start.

        Raises Unavailable.
        """
        response = await self._ask("POST", "/gpuspawner/launcher/start", body="")
        with _known_form():
            told = json.loads(response.body)["starting"]
            return frozenset(ServerRef.of_run(run["user"], run["id"]) for run in told)

    async def submit_run(self, user: str, fields: Mapping[str, Any]) -> str:
        """Submit a member's run, and return its id. Raises RefusedByHub or Unavailable."""
        return str((await self._ask_launcher("", {"user": user, **fields}))["id"])

    async def quote_run(self, user: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a member's run would cost. Raises RefusedByHub or Unavailable."""
        return await self._ask_launcher("/quote", {"user": user, **fields})

    async def submit_sweep(self, user: str, fields: Mapping[str, Any]) -> str:
        """Submit a member's sweep, and return its id. Raises RefusedByHub or Unavailable."""
        return str((await self._ask_launcher("/sweep", {"user": user, **fields}))["id"])

    async def quote_sweep(self, user: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a member's sweep costs at most. Raises RefusedByHub or Unavailable."""
        return await self._ask_launcher("/sweep/quote", {"user": user, **fields})

    async def environments(self, user: str) -> list[dict[str, Any]]:
        """Return the environments that a member may choose. Raises RefusedByHub or Unavailable."""
        return list((await self._ask_launcher("/environments", {"user": user}))["environments"])

    async def _ask_launcher(self, path: str, sent: Mapping[str, Any]) -> dict[str, Any]:
        path = f"/gpuspawner/launcher{path}"
        try:
            response = await self._fetch(
                "POST",
                path,
                headers={"Content-Type": "application/json"},
                body=json.dumps(sent),
                request_timeout=TIMEOUT,
                connect_timeout=5.0,
            )
        except HTTPClientError as error:
            raise _refused_by_hub(error, "POST", path) from None
        except (OSError, ValueError) as error:
            raise Unavailable(f"The Hub at {self.api_url} is not responding ({error}).") from None
        with _known_form():
            return dict(json.loads(response.body))

    async def image_updates(self) -> list[dict[str, Any]]:
        """Return the updates of images that run or ended lately, newest first."""
        found = await self._ask_for_updates("GET", "")
        with _known_form():
            return [_update_of(job) for job in found["jobs"]]

    async def image_offer(self, environment: str, *, actor: str) -> dict[str, Any]:
        """Return what an environment's registry offers. Raises RefusedByHub."""
        return await self._ask_for_updates("GET", f"/{_quote(environment)}", actor=actor)

    async def update_image(
        self, environment: str, *, digest: str, keep_as: str, actor: str
    ) -> dict[str, Any]:
        """Begin to update an environment's image, and return the update. Raises RefusedByHub."""
        query = {"digest": digest, "keep-as": keep_as, "actor": actor}
        found = await self._ask_for_updates("POST", f"/{_quote(environment)}", **query)
        with _known_form():
            return _update_of(found)

    async def _ask_for_updates(self, method: str, path: str, **query: str) -> dict[str, Any]:
        path = f"/gpuspawner/updates{path}"
        try:
            response = await self._fetch(
                method,
                f"{path}?{urlencode(query)}",
                headers={},
                body="" if method == "POST" else None,
                request_timeout=REGISTRY_TIMEOUT,
                connect_timeout=5.0,
            )
        except HTTPClientError as error:
            raise _refused_by_hub(error, method, path) from None
        except (OSError, ValueError) as error:
            raise Unavailable(f"The Hub at {self.api_url} is not responding ({error}).") from None
        with _known_form():
            return dict(json.loads(response.body))

    async def start_server(
        self, server: ServerRef, options: Mapping[str, Any] | None
    ) -> StartAnswer:
        """Request a server's start with these options; None: the options of its last start."""
        path = _path_of(server)
        try:
            await self._fetch(
                "POST",
                path,
                headers={"Content-Type": "application/json"},
                body="" if options is None else json.dumps(dict(options)),
                request_timeout=TAKEN_UP,
                connect_timeout=TAKEN_UP,
            )
        except HTTPClientError as error:
            if error.code == 599:  # our own timeout
                return StartAnswer.YES
            if error.code == 404:
                return StartAnswer.NO_MEMBER
            if error.code == 400:
                # It is pending or running already, unless the Hub refuses it for good.
                return StartAnswer.YES if await self.server(server) else StartAnswer.REFUSED
            if error.code in (403, 401):
                raise _not_allowed("POST", path) from None
            raise Unavailable(f"The Hub answered POST {path} with {error.code}.") from None
        except (OSError, ValueError) as error:
            raise Unavailable(f"The Hub at {self.api_url} is not responding ({error}).") from None
        return StartAnswer.YES

    async def _fetch(
        self, method: str, path: str, *, headers: Mapping[str, str], **settings: Any
    ) -> HTTPResponse:
        url, headers = self.api_url + path, {**self._headers, **headers}
        request = HTTPRequest(url, method, headers, ssl_options=self._ssl, **settings)
        return await AsyncHTTPClient().fetch(request)

    async def _ask_if_known(self, method: str, path: str) -> HTTPResponse | None:
        """Return the Hub's answer, or None if it has no such user, group or server."""
        response = await self._ask(method, path, missing_is_answer=True)
        return None if response.code == 404 else response

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: str | None = None,
        missing_is_answer: bool = False,
    ) -> HTTPResponse:
        try:
            return await self._fetch(
                method,
                path,
                headers=headers or {},
                body=body,
                request_timeout=TIMEOUT,
                connect_timeout=5.0,
            )
        except HTTPClientError as error:
            if error.code == 404 and missing_is_answer and error.response is not None:
                return error.response
            if error.code == 403:
                raise _not_allowed(method, path) from None
            raise Unavailable(
                f"The Hub answered {method} {path.partition('?')[0]} with {error.code} "
                f"({error.message}). The next round asks again."
            ) from None
        except (OSError, ValueError) as error:
            raise Unavailable(
                f"The Hub at {self.api_url} is not responding ({error}). The next round asks again."
            ) from None


def _refused_by_hub(error: HTTPClientError, method: str, path: str) -> GPUSpawnerError:
    """Return the Hub's own refusal; Unavailable if it answered otherwise, or not at all."""
    if error.response is not None:
        with suppress(ValueError, KeyError, TypeError):
            told = json.loads(error.response.body)
            return RefusedByHub(str(told["message"]), str(told["error"]), error.code)
    return Unavailable(f"The Hub answered {method} {path} with {error.code} ({error.message}).")


def _update_of(job: dict[str, Any]) -> dict[str, Any]:
    """Return an update with the names of the REST API."""
    names = {"slug": "environment", "old": "image", "new": "offered", "done_bytes": "bytes"}
    return {names.get(name, name): value for name, value in job.items()}


def _servers_of(user: dict[str, Any]) -> dict[ServerRef, HubState]:
    return {
        ServerRef(user["name"], name): HubState.READY if server["ready"] else HubState.PENDING
        for name, server in user["servers"].items()
    }


def _path_of(server: ServerRef) -> str:
    path = f"/users/{_quote(server.user)}/server"
    return f"{path}s/{_quote(server.name)}" if server.name else path


@contextmanager
def _known_form() -> Iterator[None]:
    """Raise Unavailable if the Hub's answer is not as expected."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Unavailable(
            "The Hub's list of servers is not in the form that this version knows. Use JupyterHub "
            "4 or newer, and check that the service's role holds servers."
        ) from error


def _not_allowed(method: str, path: str) -> Unavailable:
    return Unavailable(
        f"The Hub does not let this service {method} {path.partition('?')[0]}. Give it the scopes "
        "list:users, read:groups and servers (gpuspawner.add_services does), and restart the Hub."
    )


def _quote(name: str) -> str:
    return quote(name, safe="")
