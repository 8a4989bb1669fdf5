"""What containers write into their own layer, and limits for that.

Some storage drivers limit the layer themselves (``storage_opt``). With all others, only the
accounting service watches its size.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import docker
import requests
from docker.errors import APIError, DockerException, NotFound

from .base import LABEL_DISK, LABEL_LEASE
from .preflight import (
    CheckFinding,
    Status,
    no_answer,
    remove_leftovers,
    scratch_config,
    scratch_container,
)

ABOVE_IMAGE = ("overlay2", "zfs")
"""Drivers with a limit for the container's own layer."""
WITH_IMAGE = ("btrfs", "devicemapper")
"""Drivers with a limit for the layer and its image together."""
MARGIN = 0.1
"""How much more of the disk an image may take than the engine reports, as a share of its size.

That happens with many small files; nobody gets less than their limit because of it.
"""

NEAR = 0.8
"""The share of its limit at which a server's member is warned."""
SPARE = 0.05
"""The share of the engine's disk that should stay free."""

ENFORCED = "enforced"
GB = 2**30

_ANONYMOUS = re.compile(r"[0-9a-f]{64}")

REMEDY = (
    "To have the engine itself refuse what is too much, keep its data (/var/lib/docker) on XFS "
    "mounted with pquota, with the storage driver overlay2 (Engine 29 and later: "
    '"features": {"containerd-snapshotter": false} in /etc/docker/daemon.json).'
)


# Capabilities of the engine.


def storage_of(info: Mapping[str, Any]) -> str:
    """Describe the storage driver and its file system, from the engine's ``/info``."""
    below = _status(info).get("Backing Filesystem", "")
    return f"{info.get('Driver') or 'an unknown driver'}{f' on {below}' if below else ''}"


def may_enforce(info: Mapping[str, Any]) -> bool:
    """Return True if the engine's storage driver could limit a container's own layer.

    An engine with containerd's image store takes the option and does nothing with it.
    """
    driver, status = str(info.get("Driver", "")), _status(info)
    if "snapshotter" in status.get("driver-type", ""):
        return False
    if driver == "overlay2":
        return status.get("Backing Filesystem") == "xfs"
    return driver in (*ABOVE_IMAGE, *WITH_IMAGE)


def size_option(client: docker.APIClient, driver: str, image: str, limit_bytes: int) -> int:
    """Return the ``size`` for ``storage_opt`` that leaves a container ``limit_bytes`` itself.

    Blocks. Raises ImageNotFound.
    """
    if driver not in WITH_IMAGE:
        return limit_bytes
    return limit_bytes + math.ceil(int(client.inspect_image(image)["Size"]) * (1 + MARGIN))


def refusal(client: docker.APIClient, image: str, size_bytes: int) -> str:
    """Return why the engine refuses a container of this size, in its own words, or "".

    A container is created, never started, and removed. Blocks. Raises ImageNotFound, and any error
    of an engine that does not answer this question.
    """
    host = {"NetworkMode": "none", "StorageOpt": {"size": str(size_bytes)}}
    try:
        with scratch_container(client, scratch_config(image, "true", {}, host)):
            return ""
    except NotFound:
        raise
    except APIError as error:
        said = " ".join(str(error.explanation or error).split())
        if re.search("storage.opt|quota|qgroup|size", said, re.IGNORECASE):
            return said[:300]
        raise


def _status(info: Mapping[str, Any]) -> dict[str, str]:
    pairs = info.get("DriverStatus") or []
    return {str(pair[0]): str(pair[1]) for pair in pairs if len(pair) == 2}


# Use of containers.


@dataclass(frozen=True, slots=True)
class LimitedContainer:
    """A running container with a limit."""

    lease_id: str
    container_id: str
    limit_bytes: int
    is_enforced: bool
    """True if the engine itself enforces the limit."""
    folders: tuple[str, ...] = ()
    """Folders in the container that are not in its own layer."""

    def judge(self, written_bytes: int) -> str:
        """Return ``near``, ``over``, or "". What the engine limits is never over."""
        if written_bytes > self.limit_bytes and not self.is_enforced:
            return "over"
        return "near" if written_bytes >= NEAR * self.limit_bytes else ""


def label_of(limit_bytes: int, is_enforced: bool) -> str:
    """Return the value of the label with a container's limit."""
    return f"{limit_bytes} {ENFORCED}" if is_enforced else str(limit_bytes)


def limited(client: docker.APIClient) -> list[LimitedContainer]:
    """Return the running containers of leases that have a limit. Blocks."""
    wanted = {"label": [LABEL_LEASE, LABEL_DISK]}
    found = (_limited(each) for each in client.containers(filters=wanted))
    return [each for each in found if each]


def _limited(listed: Mapping[str, Any]) -> LimitedContainer | None:
    labels = listed.get("Labels") or {}
    size, _, word = str(labels.get(LABEL_DISK, "")).partition(" ")
    if not size.isdigit() or not int(size) or not labels.get(LABEL_LEASE):
        return None
    folders = [
        str(mount.get("Destination", ""))
        for mount in listed.get("Mounts") or []
        if mount.get("RW") and not _ANONYMOUS.fullmatch(str(mount.get("Name", "")))
    ]
    return LimitedContainer(
        str(labels[LABEL_LEASE]), listed["Id"], int(size), word == ENFORCED, tuple(sorted(folders))
    )


def written_bytes(client: docker.APIClient, container_id: str) -> int | None:
    """Return the size of a container's own layer; None if it no longer runs.

    The engine visits every file in it. Blocks, possibly for long.
    """
    listed = client.containers(filters={"id": container_id}, size=True)
    return int(listed[0].get("SizeRw") or 0) if listed else None


def room(folder: str) -> tuple[int, int] | None:
    """Return the free and total bytes of the disk with a folder of this machine.

    None if there is no such folder.
    """
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


# For ``gpuspawner check``.


def check_disk(
    client: docker.APIClient, image: str, limit_bytes: int, *, is_local: bool, why: str = ""
) -> CheckFinding:
    """Check who keeps a server from filling the engine's disk.

    ``why``: why no container may be tried.
    """
    name = "disk limit"
    if not limit_bytes:
        text = "Nothing limits what a server writes into its own container (disk_limit is 0)."
        return CheckFinding(
            name, Status.UNCHECKED, text, 'Set c.GPUDockerSpawner.disk_limit = "10G".'
        )
    try:
        info = client.info()
        problem = _problem(client, info, image, limit_bytes)
    except (DockerException, requests.RequestException) as error:
        return no_answer(name, error)
    found = room(str(info.get("DockerRootDir", ""))) if is_local else None
    if found and found[0] < limit_bytes:
        text = f"The engine's disk has {size(found[0])} left, and one server may write "
        text += f"{size(limit_bytes)}: it is full before anything stops that server."
        remedy = "Make room (docker system df), or set a lower c.GPUDockerSpawner.disk_limit."
        return CheckFinding(name, Status.FAIL, text, remedy)
    may = f"A server may write {size(limit_bytes)} into its own container"
    if problem is None:
        text = f"{may}; whether the engine keeps that is not known: {why}"
        return CheckFinding(name, Status.UNCHECKED, text)
    if not problem:
        text = f"{may}; the engine itself refuses more ({storage_of(info)})"
        return CheckFinding(name, Status.OK, text)
    text = f"{may}; the accounting service stops one that wrote more, for the engine does not "
    return CheckFinding(name, Status.OK, f"{text}limit it ({problem})", REMEDY)


def _problem(
    client: docker.APIClient, info: Mapping[str, Any], image: str, limit_bytes: int
) -> str | None:
    """Return why the engine does not enforce the limit, "" if it does, or None if not tried."""
    if not may_enforce(info):
        return storage_of(info)
    if not image:
        return None
    remove_leftovers(client)
    wanted = size_option(client, str(info.get("Driver", "")), image, limit_bytes)
    said = refusal(client, image, wanted)
    return f"{storage_of(info)}: {said}" if said else ""


def size(count: float) -> str:
    """Format bytes for people: ``10 GB``, ``9.5 GB``, ``200 MB``."""
    if count >= GB:
        return f"{count / GB:.1f}".removesuffix(".0") + " GB"
    return f"{count / 2**20:.0f} MB"
