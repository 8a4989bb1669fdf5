"""A Docker Engine from outside a spawn: its leased containers and when they ended."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from typing import Any, TypeVar

import docker
import requests
from docker.errors import APIError, DockerException, NotFound

from ..errors import EngineUnavailable
from ..model import Lease, LeaseState, ServerRef, Sighting
from .base import LABEL_LEASE, LABEL_MEMBER, LABEL_SERVER

T = TypeVar("T")

ENDED = ("exited", "dead", "removing")
"""Container states that prove an end. Created, running, paused and restarting do not."""

_NEVER = "0001-01-01"
_FRACTION = re.compile(r"\.(\d{1,6})\d*")


class DockerEngine:
    """The Docker Engine that the hub's servers run in.

    ``connect`` makes a client (the spawner's own settings); the default follows
    ``DOCKER_HOST`` and its relatives, like the ``docker`` command.
    """

    name = "docker"

    def __init__(self, connect: Callable[[], docker.APIClient] | None = None) -> None:
        self._connect = connect or _client_from_environment
        self._client: docker.APIClient | None = None

    def call(self, work: Callable[[docker.APIClient], T]) -> T:
        """Run ``work`` with a client.

        NotFound passes through: it is an answer. Everything else that fails is no answer,
        and raises EngineUnavailable.
        """
        try:
            if self._client is None:
                self._client = self._connect()
            return work(self._client)
        except NotFound:
            raise
        except (DockerException, requests.RequestException, OSError) as error:
            self._client = None
            raise EngineUnavailable() from error

    def sightings(self) -> list[Sighting]:
        containers = self.call(
            lambda client: client.containers(all=True, filters={"label": LABEL_LEASE})
        )
        found = []
        for listed in containers:
            state = self.inspect(listed["Id"])
            if state is None:
                continue  # it has gone since the list was made
            sighting = sighting_of(state)
            if sighting.lease_id:  # one that waits for its next start has none
                found.append(sighting)
        return found

    def inspect(self, ref: str) -> dict[str, Any] | None:
        """A container as the engine describes it; None when it is proved gone (404)."""
        try:
            return self.call(lambda client: client.inspect_container(ref))
        except NotFound:
            return None

    def end(self, sighting: Sighting) -> None:
        def stop_and_remove(client: docker.APIClient) -> None:
            client.stop(sighting.ref, timeout=10)
            try:
                client.remove_container(sighting.ref, v=False, force=True)
            except APIError as error:
                if error.status_code not in (404, 409):  # gone, or going by itself
                    raise

        with contextlib.suppress(NotFound):
            self.call(stop_and_remove)

    def removed(self, leases: Iterable[Lease], found: Iterable[Sighting]) -> list[Sighting]:
        """Servers whose container is removed by now, with their end if the events tell it.

        Read ``leases`` before you look for ``found``: a running one that is not among them
        has lost its container.
        """
        there = {sighting.lease_id for sighting in found}
        return [
            Sighting(
                lease_id=lease.id,
                ref=lease.engine_ref,
                server=lease.server,
                alive=False,
                ended_at=self.died_at(lease.engine_ref),
            )
            for lease in leases
            if lease.engine == self.name
            and lease.state is LeaseState.RUNNING
            and lease.engine_ref
            and lease.id not in there
        ]

    def died_at(self, ref: str) -> datetime | None:
        """When a container that is removed by now died, if the engine's events still say so."""

        def ask(client: docker.APIClient) -> list[dict[str, Any]]:
            # docker-py would cut a datetime to the second, and with it what just happened.
            until = f"{datetime.now(timezone.utc).timestamp():.6f}"
            wanted = {"container": ref, "event": ["die"]}
            return list(client.events(since=0, until=until, filters=wanted, decode=True))

        try:
            events = self.call(ask)
        except (EngineUnavailable, NotFound):
            return None
        times = [event["timeNano"] for event in events if "timeNano" in event]
        if not times:
            return None
        return datetime.fromtimestamp(max(times) / 1e9, tz=timezone.utc)


def sighting_of(container: dict[str, Any]) -> Sighting:
    """A container's inspection as a sighting."""
    labels = container["Config"].get("Labels") or {}
    state = container["State"]
    alive = state.get("Status") not in ENDED
    detail = ""
    if not alive:
        detail = f"exit code {state.get('ExitCode')}"
        if state.get("OOMKilled"):
            detail += ", out of memory"
        if state.get("Error"):
            detail += f", {state['Error']}"
    return Sighting(
        lease_id=labels.get(LABEL_LEASE, ""),
        ref=container["Id"],
        server=ServerRef(labels.get(LABEL_MEMBER, ""), labels.get(LABEL_SERVER, "")),
        alive=alive,
        created_at=parse_time(container.get("Created", "")),
        started_at=parse_time(state.get("StartedAt", "")),
        ended_at=None if alive else parse_time(state.get("FinishedAt", "")),
        detail=detail,
    )


def parse_time(text: str) -> datetime | None:
    """Docker's RFC 3339 time with nanoseconds; None for its zero time."""
    if not text or text.startswith(_NEVER):
        return None
    shortened = _FRACTION.sub(lambda match: "." + match[1].ljust(6, "0"), text)
    return datetime.fromisoformat(shortened.replace("Z", "+00:00")).astimezone(timezone.utc)


def _client_from_environment() -> docker.APIClient:
    return docker.APIClient(version="auto", timeout=20, **docker.utils.kwargs_from_env())
