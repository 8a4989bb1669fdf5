"""What servers need: an engine with images and GPUs, a way to the Hub, a place for files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import docker
from docker.errors import DockerException, ImageNotFound, NotFound
from requests import RequestException

from ..catalog import Catalog, Mount
from ..engines.disk import check_disk
from ..engines.injection import candidates
from ..engines.lost import check_cgroups
from ..engines.preflight import check_engine, check_image, prove_injection
from ..engines.probe import Finding, Status, no_answer
from ..engines.surroundings import check_directory, check_volume
from ..model import Device, Inventory
from ..pool import leasable
from .check_files import check_quotas
from .check_hub import check_reachable
from .hub import Hub

NO_CONTAINERS = "No containers were started (--no-containers)."


def check_docker(
    hub: Hub, catalog: Catalog | None, inventory: Inventory, containers: bool
) -> Iterator[Finding]:
    """Everything about servers that run in Docker."""
    finding, client = check_engine(hub.connect, hub.engine_address)
    yield finding
    if client is None:
        for name in ("image", "GPU injection", "hub API", "disk limit", "workspace"):
            yield Finding(name, Status.UNCHECKED, "The engine does not answer.")
        return
    images = images_of(hub, catalog)
    for image in images:
        yield check_image(client, image)
    image = _first_present(client, images) if containers else ""
    why = "There is no image to try with." if containers else NO_CONTAINERS
    if image:
        finding, mode = check_injection(client, image, hub, inventory)
        yield finding
        if mode:
            yield _check_cgroups(client, mode)
        yield check_reachable(client, image, hub)
    else:
        yield Finding("GPU injection", Status.UNCHECKED, why)
        yield Finding("hub API", Status.UNCHECKED, why)
    limit = int(getattr(hub.spawner, "disk_limit", 0))
    yield check_disk(client, image, limit, is_local=hub.engine_is_local, why=why)
    yield _check_workspace(client, image, hub, why)
    yield from check_quotas(hub)
    if catalog is not None and (mounts := (*catalog.datasets, *catalog.shared_folders)):
        yield _check_mounts(client, mounts, hub)


def check_local(hub: Hub) -> Iterator[Finding]:
    """Everything about servers that run as processes beside the hub."""
    for name in ("engine", "image", "GPU injection", "hub API", "disk limit"):
        yield Finding(name, Status.UNCHECKED, "Servers run as local processes, for trying out.")
    root = Path(root_of(str(getattr(hub.spawner, "workspace", ""))) or ".").resolve()
    there = next(p for p in (root, *root.parents) if p.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        yield Finding("workspace", Status.OK, f"Members' directories can be made in {root}")
    else:
        text = f"Members' directories cannot be made in {root}: {there} is not writable."
        yield Finding("workspace", Status.FAIL, text, f"Let the hub's user write {there}.")


def images_of(hub: Hub, catalog: Catalog | None) -> list[str]:
    """The images that members can choose, each once; those for GPUs first."""
    if catalog is None:
        return [hub.spawner.image]
    ordered = sorted(catalog.environments, key=lambda e: e.cpu_only)
    images = (image for environment in ordered for image in environment.images)
    return list(dict.fromkeys(image or hub.spawner.image for image in images))


def root_of(template: str) -> str:
    """The directory that all members' directories lie in: ``/srv/workspaces`` of
    ``/srv/workspaces/{username}``."""
    return os.path.dirname(template.partition("{")[0]) if "{" in template else template


def _first_present(client: docker.APIClient, images: Sequence[str]) -> str:
    for image in images:
        try:
            client.inspect_image(image)
            return image
        except (ImageNotFound, DockerException, RequestException):
            continue
    return ""


# GPU injection.


def check_injection(
    client: docker.APIClient, image: str, hub: Hub, inventory: Inventory
) -> tuple[Finding, str]:
    """The finding, and the mode that works; nothing when none was proved to."""
    name = "GPU injection"
    wanted = str(getattr(hub.spawner, "gpu_injection", "auto"))
    device = _device_to_try(inventory)
    if device is None:
        return Finding(name, Status.UNCHECKED, "There is no device to try with."), ""
    if wanted != "auto":
        finding = prove_injection(client, image, wanted, device.uuid)
        return finding, wanted if finding.status is Status.OK else ""
    if inventory.source == "simulated":
        text = "The devices are simulated: none is injected unless gpu_injection says how."
        return Finding(name, Status.UNCHECKED, text), ""
    try:
        modes = candidates(client.info())
    except (DockerException, RequestException):
        return Finding(name, Status.UNCHECKED, "The engine does not say what it offers."), ""
    failed: list[Finding] = []
    for mode in modes:
        finding = prove_injection(client, image, mode, device.uuid)
        if finding.status is Status.OK:
            return finding, mode
        failed.append(finding)
    text = " ".join(dict.fromkeys(finding.text for finding in failed))
    return Finding(name, failed[0].status, text, failed[0].remedy), ""


def _check_cgroups(client: docker.APIClient, mode: str) -> Finding:
    try:
        return check_cgroups(client.info(), mode)
    except (DockerException, RequestException) as error:
        return no_answer("GPUs stay", error)


def _device_to_try(inventory: Inventory) -> Device | None:
    """A device that could be leased, idle if possible. Looking does not disturb its user."""
    able = [device for device in inventory.devices if leasable(device) is None]
    return min(able, key=lambda d: len(d.compute_processes), default=None)


# Files.


def _check_workspace(client: docker.APIClient, image: str, hub: Hub, why: str) -> Finding:
    name, template = "workspace", str(getattr(hub.spawner, "workspace", ""))
    if not template and hub.spawner.volumes:
        text = "Files are kept as c.DockerSpawner.volumes says: this check does not judge that."
        return Finding(name, Status.UNCHECKED, text)
    if not template:
        text = "Members' files go with their container."
        remedy = 'Set c.GPUDockerSpawner.workspace = "gpuspawner-work-{username}".'
        return Finding(name, Status.FAIL, text, remedy)
    if not template.startswith("/"):
        return check_volume(client)
    if not image:
        return Finding(name, Status.UNCHECKED, why)
    return check_directory(client, image, root_of(template))


def _check_mounts(client: docker.APIClient, mounts: Sequence[Mount], hub: Hub) -> Finding:
    """Whether datasets and shared folders are where the catalog says."""
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
        return Finding("datasets", Status.FAIL, text, remedy)
    if unseen:
        text = "Whether they are on the engine's machine cannot be seen from here: "
        text += ", ".join(m.name for m in unseen) + "."
        return Finding("datasets", Status.UNCHECKED, text)
    return Finding("datasets", Status.OK, f"{', '.join(m.name for m in mounts)}: there")
