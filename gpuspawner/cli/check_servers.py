"""Checks of what servers need: an engine, GPUs, a way to the Hub, storage, and nodes' clocks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

import docker
from docker.errors import DockerException, NotFound
from requests import RequestException

from ..catalog.loader import Catalog
from ..catalog.models import Mount
from ..devices.models import Device, Inventory
from ..devices.placement import leasable
from ..engines.disk_usage import check_disk
from ..engines.gpu_loss import check_cgroups
from ..engines.injection import candidates
from ..engines.preflight import (
    CheckFinding,
    Status,
    check_directory,
    check_engine,
    check_image,
    check_volume,
    no_answer,
    prove_injection,
)
from ..engines.scratch import check_scratch
from ..slurm.cluster import Node
from ..slurm.telemetry import MOST_APART, seconds_ahead
from ..storage.quotas import Quotas
from ..storage.service import GPUFolders
from .check_hub import check_reachable
from .hub import HubSettings


def check_quotas(hub: HubSettings) -> Iterator[CheckFinding]:
    """Yield a finding for each kind of quota that is set."""
    settings = GPUFolders(config=hub.app.config)
    quotas = Quotas(settings.xfs_quota)
    if getattr(hub.spawner, "workspace_quota", 0):
        yield _check("quota", str(hub.spawner.workspace), "c.GPUDockerSpawner.workspace", quotas)
    if settings.quota and settings.source:
        yield _check("folder quota", settings.source, "c.GPUFolders.source", quotas)


def _check(name: str, template: str, setting: str, quotas: Quotas) -> CheckFinding:
    root = root_of(template)
    if not template.startswith("/"):
        text = "A quota is set but not enforced: a volume takes whatever is written into it."
        remedy = f'Keep files in a directory of XFS: {setting} = "/srv/.../{{...}}".'
        return CheckFinding(name, Status.FAIL, text, remedy)
    if problem := quotas.problem(root):
        remedy = "Make an XFS, mount it with the option prjquota (in /etc/fstab), and let "
        remedy += "xfs_quota run as root; until then a full workspace is only noticed."
        return CheckFinding(name, Status.FAIL, problem, remedy)
    return CheckFinding(name, Status.OK, f"{root}: the file system keeps quotas")


REFUSED = 300.0
"""Seconds of difference from which munge, and with it Slurm, refuses everything."""

_FRACTION = re.compile(r"\.\d+")


def check_clock(node: Node, client: docker.APIClient | None) -> CheckFinding | None:
    """Check how far a node's clock is from this machine's; None if nothing there shows it.

    ``client`` is that of the node's engine, if it answers. It and the node's sampler show their
    time without munge.
    """
    name = f"clock {node.name}"
    told = [*_of_engine(client)]
    if node.sampler and (ahead := seconds_ahead(node)) is not None:
        told.append(ahead)
    if not told:
        return None
    apart = max(told, key=abs)
    if abs(apart) <= MOST_APART:
        return CheckFinding(name, Status.OK, f"It is within {MOST_APART:.0f} s of this machine's")
    text = f"Its clock is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} this machine's"
    if abs(apart) < REFUSED:
        text += f": at {REFUSED:.0f} s munge refuses its messages, and Slurm gives up on it."
    else:
        text += ": munge refuses its messages, and Slurm gives it no jobs."
    remedy = (
        f"On {node.name}, and here: timedatectl. Let every machine keep its time by NTP: apt-get "
        "install systemd-timesyncd"
    )
    return CheckFinding(name, Status.FAIL, text, remedy)


def _of_engine(client: docker.APIClient | None) -> Iterator[float]:
    """Yield how many seconds the engine's clock is ahead, if it reports a time."""
    if client is None:
        return
    try:
        before = datetime.now(timezone.utc)
        said = _FRACTION.sub("", str(client.info()["SystemTime"]))
        here = before + (datetime.now(timezone.utc) - before) / 2
        there = datetime.fromisoformat(said.replace("Z", "+00:00"))
        yield (there - here).total_seconds()
    except (DockerException, RequestException, KeyError, ValueError, TypeError):
        return  # other findings report what is wrong with it


NO_CONTAINERS = "No containers were started (--no-containers)."


def check_docker(
    hub: HubSettings, catalog: Catalog | None, inventory: Inventory, containers: bool
) -> Iterator[CheckFinding]:
    """Yield everything about servers that run in Docker."""
    finding, client = check_engine(hub.connect, hub.engine_address)
    yield finding
    if client is None:
        for name in ("image", "GPU injection", "hub API", "disk limit", "workspace"):
            yield CheckFinding(name, Status.UNCHECKED, "The engine is not responding.")
        return
    images = images_of(hub, catalog)
    for image in images:
        yield check_image(client, image)
    image = first_present(client, images) if containers else ""
    why = "There is no image to try with." if containers else NO_CONTAINERS
    if image:
        finding, mode = check_injection(client, image, hub, inventory)
        yield finding
        if mode:
            yield _check_cgroups(client, mode)
        yield check_reachable(client, image, hub)
    else:
        yield CheckFinding("GPU injection", Status.UNCHECKED, why)
        yield CheckFinding("hub API", Status.UNCHECKED, why)
    limit = int(getattr(hub.spawner, "disk_limit", 0))
    yield check_disk(client, image, limit, is_local=hub.engine_is_local, why=why)
    yield from _check_scratch(client, hub)
    yield _check_workspace(client, image, hub, why)
    yield from check_quotas(hub)
    if catalog is not None and (mounts := (*catalog.datasets, *catalog.shared_folders)):
        yield _check_mounts(client, mounts, hub)


def _check_scratch(client: docker.APIClient, hub: HubSettings) -> Iterator[CheckFinding]:
    finding = check_scratch(
        client,
        int(getattr(hub.spawner, "scratch_size", 0)),
        is_local=hub.engine_is_local,
        is_removed=bool(getattr(hub.spawner, "remove", False)),
    )
    if finding is not None:
        yield finding


def check_local(hub: HubSettings) -> Iterator[CheckFinding]:
    """Yield everything about servers that run as processes beside the hub."""
    for name in ("engine", "image", "GPU injection", "hub API", "disk limit"):
        yield CheckFinding(
            name, Status.UNCHECKED, "Servers run as local processes, for trying out."
        )
    root = Path(root_of(str(getattr(hub.spawner, "workspace", ""))) or ".").resolve()
    there = next(p for p in (root, *root.parents) if p.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        yield CheckFinding("workspace", Status.OK, f"Members' directories can be made in {root}")
    else:
        text = f"Members' directories cannot be made in {root}: {there} is not writable."
        yield CheckFinding("workspace", Status.FAIL, text, f"Let the hub's user write {there}.")


def images_of(hub: HubSettings, catalog: Catalog | None) -> list[str]:
    """Return the images that members can choose, each once; those for GPUs first."""
    if catalog is None:
        return [hub.spawner.image]
    ordered = sorted(catalog.environments, key=lambda e: e.cpu_only)
    images = (image for environment in ordered for image in environment.images)
    return list(dict.fromkeys(image or hub.spawner.image for image in images))


def root_of(template: str) -> str:
    """Return the parent of all directories made from ``/srv/workspaces/{username}``."""
    return os.path.dirname(template.partition("{")[0]) if "{" in template else template


def first_present(client: docker.APIClient, images: Sequence[str]) -> str:
    """Return the first of the images that the engine has; empty if it has none."""
    for image in images:
        with suppress(DockerException, RequestException):
            client.inspect_image(image)
            return image
    return ""


# GPU injection.


def check_injection(
    client: docker.APIClient, image: str, hub: HubSettings, inventory: Inventory
) -> tuple[CheckFinding, str]:
    """Return the finding, and the mode that was proven to work; empty if none."""
    name = "GPU injection"
    wanted = str(getattr(hub.spawner, "gpu_injection", "auto"))
    device = _device_to_try(inventory)
    if device is None:
        return CheckFinding(name, Status.UNCHECKED, "There is no device to try with."), ""
    if wanted != "auto":
        finding = prove_injection(client, image, wanted, device.uuid)
        return finding, wanted if finding.status is Status.OK else ""
    if inventory.source == "simulated":
        text = "The devices are simulated: none is injected unless gpu_injection says how."
        return CheckFinding(name, Status.UNCHECKED, text), ""
    try:
        modes = candidates(client.info())
    except (DockerException, RequestException):
        return CheckFinding(name, Status.UNCHECKED, "The engine does not say what it offers."), ""
    failed: list[CheckFinding] = []
    for mode in modes:
        finding = prove_injection(client, image, mode, device.uuid)
        if finding.status is Status.OK:
            return finding, mode
        failed.append(finding)
    text = " ".join(dict.fromkeys(finding.text for finding in failed))
    return CheckFinding(name, failed[0].status, text, failed[0].remedy), ""


def _check_cgroups(client: docker.APIClient, mode: str) -> CheckFinding:
    try:
        return check_cgroups(client.info(), mode)
    except (DockerException, RequestException) as error:
        return no_answer("GPUs stay", error)


def _device_to_try(inventory: Inventory) -> Device | None:
    """Return a leasable device, idle if possible. The check does not disturb its user."""
    able = [device for device in inventory.devices if leasable(device) is None]
    return min(able, key=lambda d: len(d.compute_processes), default=None)


# Files.


def _check_workspace(
    client: docker.APIClient, image: str, hub: HubSettings, why: str
) -> CheckFinding:
    name, template = "workspace", str(getattr(hub.spawner, "workspace", ""))
    if not template and hub.spawner.volumes:
        text = "Files are kept as c.DockerSpawner.volumes says: this check does not judge that."
        return CheckFinding(name, Status.UNCHECKED, text)
    if not template:
        text = "Members' files are lost with their container."
        remedy = 'Set c.GPUDockerSpawner.workspace = "gpuspawner-work-{username}".'
        return CheckFinding(name, Status.FAIL, text, remedy)
    if not template.startswith("/"):
        return check_volume(client)
    if not image:
        return CheckFinding(name, Status.UNCHECKED, why)
    return check_directory(client, image, root_of(template))


def _check_mounts(
    client: docker.APIClient, mounts: Sequence[Mount], hub: HubSettings
) -> CheckFinding:
    """Check that datasets and shared folders are where the catalog says."""
    missing, unseen = [], []
    for mount in mounts:
        if mount.is_volume:
            try:
                client.inspect_volume(mount.source)
            except NotFound:
                missing.append(mount)
            except (DockerException, RequestException):
                unseen.append(mount)
        elif not hub.engine_is_local:
            unseen.append(mount)
        elif not os.path.isdir(mount.source):
            missing.append(mount)
    if missing:
        text = "Not there: " + ", ".join(f"{m.name} ({m.source})" for m in missing) + "."
        remedy = "Make these folders or volumes on the engine's machine, or correct the catalog."
        return CheckFinding("datasets", Status.FAIL, text, remedy)
    if unseen:
        text = "This machine cannot see if they are on the engine's machine: "
        text += ", ".join(m.name for m in unseen) + "."
        return CheckFinding("datasets", Status.UNCHECKED, text)
    return CheckFinding("datasets", Status.OK, f"{', '.join(m.name for m in mounts)}: there")
