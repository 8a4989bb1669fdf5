"""A Docker Engine outside of spawns: its leased containers and when they ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar

import docker
import requests
from docker.errors import APIError, DockerException, NotFound

from ..core.errors import AnotherEngine, EngineUnavailable
from ..core.units import format_bytes
from ..leases.models import Lease, LeaseState, ServerRef, Sighting
from .base import LABEL_LEASE, LABEL_MEMBER, LABEL_SERVER
from .files import MountedWorkspace, remove_leftovers
from .resource_use import (
    REPORT,
    MemoryKill,
    ReportedUse,
    ResourceUse,
    memory_kill,
    parse_time,
    read_report,
    read_stats,
)

T = TypeVar("T")

ENDED = ("exited", "dead", "removing")
"""Container states that prove an end. Created, running, paused and restarting do not."""

_AT_REST = (*ENDED, "created")
LONGEST_LINE = 200
"""Characters of a line that a program printed."""


class DockerEngine:
    """The Docker Engine that runs the hub's servers.

    ``connect`` creates a client with the spawner's settings; the default follows ``DOCKER_HOST``
    and related variables, like the ``docker`` command. ``stamp_error`` returns how much earlier
    than those of leases the engine's times may be, because the wall clock was set.
    """

    name = "docker"

    def __init__(
        self,
        connect: Callable[[], docker.APIClient] | None = None,
        stamp_error: Callable[[], timedelta] = timedelta,
    ) -> None:
        self._connect = connect or client_from_environment
        self._stamp_error = stamp_error
        self._client: docker.APIClient | None = None

    def call(self, work: Callable[[docker.APIClient], T]) -> T:
        """Run ``work`` with a client.

        NotFound passes through, because it is an answer. Any other failure is no answer, and raises
        EngineUnavailable.
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
        """Return every container with a lease label; see :meth:`.base.Engine.sightings`."""
        containers = self.call(
            lambda client: client.containers(all=True, filters={"label": LABEL_LEASE})
        )
        found = []
        for listed in containers:
            state = self.inspect(listed["Id"])
            if state is None:
                continue  # it disappeared after it was listed
            sighting = sighting_of(state)
            if sighting.lease_id:  # a container that waits for its next start has none
                found.append(sighting)
        return found

    def _list(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.call(lambda client: client.containers(all=True))
        return found

    def inspect(self, ref: str) -> dict[str, Any] | None:
        """Inspect a container; None if it is proven gone (404)."""
        try:
            return self.call(lambda client: client.inspect_container(ref))
        except NotFound:
            return None

    def end(self, sighting: Sighting) -> None:
        """Stop and remove a server's container."""

        def stop_and_remove(client: docker.APIClient) -> None:
            client.stop(sighting.ref, timeout=10)
            try:
                client.remove_container(sighting.ref, v=False, force=True)
            except APIError as error:
                if error.status_code not in (404, 409):  # gone, or being removed
                    raise

        with contextlib.suppress(NotFound):
            self.call(stop_and_remove)

    def signal(self, ref: str, name: str) -> None:
        """Send a signal to a container's first process; one that does not run gets none."""

        def kill(client: docker.APIClient) -> None:
            try:
                client.kill(ref, name)
            except APIError as error:
                if error.status_code != 409:  # it has ended
                    raise

        with contextlib.suppress(NotFound):
            self.call(kill)

    def last_line(self, ref: str) -> str:
        """Return the last line that a container printed; empty if nothing was, or none was kept."""
        lines = [line for line in self._last_lines(ref) if not line.startswith(REPORT)]
        return lines[-1] if lines else ""

    def reported_use(self, ref: str) -> ReportedUse | None:
        """Return what the program of a run that has ended reported; see :class:`EngineWithUse`."""
        container, lines = self.inspect(ref), self._last_lines(ref)
        if container is None or not lines or not lines[-1].startswith(REPORT):
            return None
        return read_report(lines[-1], container, self.call(lambda client: client.info()))

    def _last_lines(self, ref: str) -> list[str]:
        """Return the last lines that a container printed, those that are not empty."""

        def read(client: docker.APIClient) -> list[str]:
            try:
                printed: str = client.logs(ref, tail=10).decode(errors="replace")
            except APIError:  # a log driver that cannot read, or no such container
                return []
            lines = (line.strip() for line in printed.splitlines())
            return ["".join(filter(str.isprintable, x))[:LONGEST_LINE] for x in lines if x]

        return self.call(read)

    def end_process(self, ref: str, pid: int, signal_name: str) -> bool:
        """Send a signal to a process in a container; see :class:`EngineWithProcesses`."""
        return self._run_inside(ref, 'kill -s "$1" "$2"', signal_name.removeprefix("SIG"), str(pid))

    def write_log(self, ref: str, line: str) -> None:
        """Write a line to where a container's first process writes its errors."""
        self._run_inside(ref, 'printf "%s\\n" "$1" >> /proc/1/fd/2', line)

    def _run_inside(self, ref: str, script: str, *arguments: str) -> bool:
        """Run a shell script in a container, as its own user; True if it succeeded.

        A container that is gone or paused, or that has no shell, runs nothing.
        """

        def run(client: docker.APIClient) -> bool:
            command = ["/bin/sh", "-c", script, "sh", *arguments]
            try:
                made = client.exec_create(ref, command)
                client.exec_start(made["Id"])
                return client.exec_inspect(made["Id"])["ExitCode"] == 0
            except APIError:
                return False

        return self.call(run)

    def resource_use(self, ref: str) -> ResourceUse | None:
        """Return what a container uses now; None if it is not running. Raises EngineUnavailable."""
        try:
            answer = self.call(lambda client: client.stats(ref, stream=False, one_shot=True))
        except NotFound:
            return None
        return read_stats(answer)

    def memory_limit(self, ref: str) -> int | None:
        """Return how many bytes of memory a container may use; None if it is gone or has no limit.

        Raises EngineUnavailable.
        """
        container = self.inspect(ref)
        return (container["HostConfig"].get("Memory") or None) if container else None

    def memory_kills(self) -> list[MemoryKill]:
        """Return when the system ended programs of leases because their memory was used up.

        As far as the engine's latest events show it. Raises EngineUnavailable.
        """
        wanted = {"type": ["container"], "event": ["oom"], "label": [LABEL_LEASE]}
        found = (memory_kill(event, LABEL_LEASE) for event in self._events(wanted))
        return [each for each in found if each]

    def mount_workspace(self, source: str) -> MountedWorkspace:
        """Return a directory or volume, readable; see :class:`MountedWorkspace`."""
        return self.call(lambda client: MountedWorkspace(client, source))

    def remove_leftovers(self) -> None:
        """Remove the containers with which a killed process read files."""
        self.call(remove_leftovers)

    def identity(self) -> str:
        """Return which engine answers: its id, and the folder with its containers.

        A restart does not change it. Raises EngineUnavailable.
        """
        info = self.call(lambda client: client.info())
        return f"{info.get('ID', '')} {info.get('DockerRootDir', '')}"

    def holders(
        self, lease: Lease, name: str = "", among: list[dict[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """Return every container that may hold a lease's devices, as inspected.

        These are containers with the lease's label, those with the recorded id or with ``name``,
        whatever they are called or labelled now, and running ones without a lease that were given
        one of its devices since the grant. A list without a living one proves the server gone,
        unless another engine answers than the one that started it: then only the lease's own
        container proves anything, and without it this raises AnotherEngine. ``among`` is the
        engine's list of containers, if the caller has it. Raises EngineUnavailable.
        """
        found = {}
        for listed, is_its_own in _candidates(
            self._list() if among is None else among, lease, name
        ):
            if (state := self.inspect(listed["Id"])) is None:
                continue
            if is_its_own or was_given(state, lease, self._stamp_error()):
                found[state["Id"]] = state
        tells = any(
            belongs_to(each, lease) or each["State"].get("Status") not in _AT_REST
            for each in found.values()
        )
        if not tells and lease.engine_id and lease.engine_id != self.identity():
            raise AnotherEngine()
        return list(found.values())

    def is_only_holder(self, container_id: str, lease: Lease, name: str) -> bool:
        """Return True if this container has ended and no other may hold the lease's devices.

        Only containers of nobody's lease are inspected for it. False also means that the engine
        no longer has the container. Raises EngineUnavailable.
        """
        listed = self._list()
        found = {each["Id"]: each for each, _ in _candidates(listed, lease, name)}
        if container_id not in found:
            return False
        if len(found) == 1:
            return found[container_id].get("State") in ENDED
        left = self.holders(lease, name, among=listed)
        return [each["Id"] for each in left] == [container_id] and not is_alive(left[0])

    def removed(self, leases: Iterable[Lease], found: Iterable[Sighting]) -> list[Sighting]:
        """Return what happened to the servers of ``leases`` that are not in ``found``.

        Servers whose container was removed, with their end if the events show it; those that live
        without the lease's label; and those in an unknown state. Read ``leases`` before ``found``:
        a running lease that is missing there has lost its container.
        """
        there = {sighting.lease_id for sighting in found if sighting.alive}
        ended = {sighting.lease_id for sighting in found if not sighting.alive}
        doubted = [x for x in leases if x.engine == self.name and x.id not in there]
        listed = self._list() if doubted else []
        more = []
        for lease in doubted:
            gone = Sighting(
                lease_id=lease.id, ref=lease.engine_ref, server=lease.server, alive=False
            )
            try:
                living = [each for each in self.holders(lease, among=listed) if is_alive(each)]
            except AnotherEngine:
                if lease.id not in ended:
                    more.append(replace(gone, alive=True, unknown=_elsewhere(lease)))
                continue
            if living:
                more += [_of_lease(each, lease) for each in living]
            elif lease.id not in ended and lease.state is LeaseState.RUNNING and lease.engine_ref:
                died = self.died_at(lease.engine_ref)
                more.append(replace(gone, ended_at=died))
        return more

    def died_at(self, ref: str) -> datetime | None:
        """Return when a removed container died, if the engine's events still show it."""
        try:
            events = self._events({"container": ref, "event": ["die"]})
        except (EngineUnavailable, NotFound):
            return None
        times = [event["timeNano"] for event in events if "timeNano" in event]
        if not times:
            return None
        return datetime.fromtimestamp(max(times) / 1e9, tz=timezone.utc)

    def _events(self, wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return what the engine still has of its events until now."""

        def ask(client: docker.APIClient) -> list[dict[str, Any]]:
            # docker-py would truncate a datetime to the second, and with it what just happened.
            until = f"{datetime.now(timezone.utc).timestamp():.6f}"
            return list(client.events(since=0, until=until, filters=wanted, decode=True))

        return self.call(ask)


def is_alive(container: dict[str, Any]) -> bool:
    """Return True unless the container has exited."""
    return container["State"].get("Status") not in ENDED


def _candidates(
    listed: Iterable[dict[str, Any]], lease: Lease, name: str
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield the listed containers that may hold a lease's devices, and True for the lease's own."""
    for each in listed:
        owner = (each.get("Labels") or {}).get(LABEL_LEASE, "")
        is_its_own = (
            owner == lease.id
            or each["Id"] == lease.engine_ref
            or bool(name and f"/{name}" in (each.get("Names") or ()))
        )
        # The engine's word for a running container; others hold no device.
        may_hold = bool(lease.devices) and not owner and each.get("State") not in _AT_REST
        if is_its_own or may_hold:
            yield each, is_its_own


def belongs_to(container: dict[str, Any], lease: Lease) -> bool:
    """Return True if the container is the lease's own, by its label or its recorded id."""
    return lease_of(container) == lease.id or container["Id"] == lease.engine_ref


def lease_of(container: dict[str, Any]) -> str:
    """Return the id in the container's lease label; empty if it has none."""
    return str((container["Config"].get("Labels") or {}).get(LABEL_LEASE, ""))


def foreign_holder(container: dict[str, Any], lease: Lease) -> str:
    """Describe a foreign container that holds devices of a lease, and what to do."""
    name = str(container.get("Name", "")).lstrip("/") or container["Id"][:12]
    return (
        f"the container {name}, which belongs to no lease, was given a GPU of lease {lease.id}. "
        f"Stop that container, or free the lease with: gpuspawner release {lease.id} --force"
    )


def _elsewhere(lease: Lease) -> str:
    return (
        "another engine answers than the one that its server was started on. Connect that one "
        f"again, or free the lease with: gpuspawner release {lease.id} --force"
    )


def _of_lease(container: dict[str, Any], lease: Lease) -> Sighting:
    """Return a living container as a sighting of the lease's server."""
    seen = replace(sighting_of(container), lease_id=lease.id, server=lease.server)
    if belongs_to(container, lease):
        return seen
    return replace(seen, unknown=foreign_holder(container, lease))


def was_given(
    container: dict[str, Any], lease: Lease, stamp_error: timedelta = timedelta()
) -> bool:
    """Return True if the container may have got a device of the lease after the grant.

    From when it was started; the engine's times may be earlier by ``stamp_error``.
    """
    started = parse_time(container["State"].get("StartedAt", ""))
    if started is None or started < lease.granted_at - stamp_error:
        return False
    named = _named_devices(container)
    return any(device.uuid in named or str(device.index) in named for device in lease.devices)


def _named_devices(container: dict[str, Any]) -> frozenset[str]:
    """Return the devices that a container was given by name: UUIDs or indices."""
    host = container["HostConfig"]
    named: list[str] = []
    for request in host.get("DeviceRequests") or ():
        named += request.get("DeviceIDs") or ()
    if host.get("Runtime") == "nvidia":
        for item in container["Config"].get("Env") or ():
            variable, _, value = item.partition("=")
            if variable == "NVIDIA_VISIBLE_DEVICES":
                named += value.split(",")
    return frozenset(each.rpartition("=")[2] for each in named)  # CDI: nvidia.com/gpu=UUID


def sighting_of(container: dict[str, Any]) -> Sighting:
    """Convert a container's inspection to a sighting."""
    labels = container["Config"].get("Labels") or {}
    state = container["State"]
    alive = is_alive(container)
    started_at = parse_time(state.get("StartedAt", ""))
    out_of_memory = not alive and bool(state.get("OOMKilled"))
    detail = "" if alive or started_at else "it was never started"
    if not alive and started_at:
        detail = f"exit code {state.get('ExitCode')}"
        if out_of_memory:
            detail += ", out of memory"
            if limit := container["HostConfig"].get("Memory"):
                detail += f" (limit {format_bytes(limit)})"
        if state.get("Error"):
            detail += f", {state['Error']}"
    return Sighting(
        lease_id=labels.get(LABEL_LEASE, ""),
        ref=container["Id"],
        server=ServerRef(labels.get(LABEL_MEMBER, ""), labels.get(LABEL_SERVER, "")),
        alive=alive,
        created_at=parse_time(container.get("Created", "")),
        started_at=started_at,
        ended_at=None if alive else parse_time(state.get("FinishedAt", "")),
        detail=detail,
        # The engine's word for a container that never started, and was removed, is 0.
        exit_code=state.get("ExitCode") if started_at and not alive else None,
        out_of_memory=out_of_memory,
    )


def client_from_environment(timeout: float = 20.0) -> docker.APIClient:
    """Return a client of the engine that ``DOCKER_HOST`` names. ``timeout`` is in seconds."""
    return docker.APIClient(version="auto", timeout=timeout, **docker.utils.kwargs_from_env())
