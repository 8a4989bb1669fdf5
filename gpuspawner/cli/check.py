"""``gpuspawner check``: is everything there that a hub needs? One line each, with the remedy."""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..broker.broker import utcnow
from ..broker.view import COUNTED, DeviceView
from ..catalog import Catalog, load
from ..engines.probe import Finding, Status
from ..errors import ConfigError, GPUSpawnerError, TooMuchAsked
from ..model import DeviceStatus, Inventory, Request
from ..pool import must_run
from ..slurm.cluster import Cluster, read_cluster
from ..store.health import Known
from ..telemetry.health import SICK
from .check_database import check_database
from .config import DEFAULT_FILE, Settings
from .devices import look
from .output import count, printable

if TYPE_CHECKING:
    from .hub import Hub

PRODUCTION = "gpuspawner.spawners.docker.GPUDockerSpawner"
"""Whose needs are checked when there is no configuration."""

LEANING_ON_HUB = (
    "engine",
    "image",
    "GPU injection",
    "hub API",
    "disk limit",
    "workspace",
    "proxy",
    "accounting",
    "idle culler",
)
NO_GPU = (
    "Install NVIDIA's driver and see that nvidia-smi lists the GPUs. To try out without any: "
    'c.Broker.device_source = "simulated:4xA100-80GB".'
)

WORDS = {Status.OK: "ok", Status.FAIL: "FAIL", Status.UNCHECKED: "not checked"}
COLOURS = {Status.OK: "\x1b[32m", Status.FAIL: "\x1b[31m", Status.UNCHECKED: "\x1b[33m"}
PLAIN = "\x1b[0m"
WORD_WIDTH, NAME_WIDTH = 11, 14


def check(arguments: argparse.Namespace, settings: Settings) -> int:
    """Run every check; 1 when one is red."""
    found = []
    with _ended_cleanly():
        for finding in findings(settings, containers=not arguments.no_containers):
            found.append(finding)
            if not arguments.json:
                print(line_of(finding, _coloured()), flush=True)
    ok = all(finding.status is not Status.FAIL for finding in found)
    if arguments.json:
        checks: list[dict[str, Any]] = [asdict(f) | {"status": f.status.value} for f in found]
        print(json.dumps({"ok": ok, "checks": checks}, indent=2, ensure_ascii=False))
    else:
        print(f"\n{_summary(found)}")
    return 0 if ok else 1


def findings(settings: Settings, *, containers: bool = True) -> Iterator[Finding]:
    """Every check in the order in which one leans on the other."""
    # JupyterHub is imported here, after the first words of the other commands: it is slow.
    from .check_class import check_spawner_class
    from .check_hub import check_proxy, check_services
    from .check_servers import check_docker, check_local
    from .check_slurm import check_slurm

    finding, hub = _configuration(settings)
    yield finding
    if settings.file is not None and hub is not None and hub.leases_gpus:
        yield from _whatever_happens("spawner class", check_spawner_class(settings.file, hub))
    catalog = None
    if hub is not None and hub.leases_gpus:
        finding, catalog = _catalog(hub)
        yield finding
    finding, readable = check_database(settings.database_url)
    yield finding
    cluster = None
    if hub is not None and hub.cluster_file:
        finding, cluster = _cluster(hub)
        inventory = Inventory(devices=(), observed_at=utcnow(), source="slurm")
    else:
        finding, inventory = _devices(settings, readable)
    yield finding
    if catalog is not None and (old := _too_old(catalog, inventory)):
        yield Finding("driver", Status.FAIL, old, "Install a newer driver, or change the entry.")
    if hub is None:
        for name in LEANING_ON_HUB:
            yield Finding(name, Status.UNCHECKED, "The configuration is not valid.")
        return
    if hub.uses_docker:
        yield from _whatever_happens("servers", check_docker(hub, catalog, inventory, containers))
    else:
        yield from _whatever_happens("servers", check_local(hub))
    if cluster is not None:
        yield from _whatever_happens("cluster", check_slurm(hub, catalog, cluster, containers))
    yield from _whatever_happens("proxy", check_proxy(hub))
    yield from _whatever_happens("services", check_services(hub))


def _whatever_happens(name: str, steps: Iterator[Finding]) -> Iterator[Finding]:
    """The findings of some steps; one that breaks is red and hides no other."""
    try:
        yield from steps
    except Exception as error:
        text = f"This check broke ({type(error).__name__}: {error})."
        yield Finding(name, Status.FAIL, text, "Please report it: that should not happen.")


# Configuration and catalog.


def _configuration(settings: Settings) -> tuple[Finding, Hub | None]:
    from .hub import open_hub

    name, config = "configuration", settings.config
    if settings.file is None:
        config = copy.deepcopy(config)
        config.JupyterHub.spawner_class = PRODUCTION
    try:
        hub = open_hub(config)
    except ConfigError as error:
        remedy = f"Correct {settings.file}: the hub would not start with it."
        return Finding(name, Status.FAIL, error.message, remedy), None
    kind = type(hub.spawner).__name__
    if settings.file is None:
        text = f"There is no {DEFAULT_FILE} here (-f names one): checking what {kind} needs."
        return Finding(name, Status.UNCHECKED, text), hub
    if not hub.leases_gpus:
        text = f"{settings.file}: its spawner {kind} leases no GPUs."
        remedy = 'Set c.JupyterHub.spawner_class = "gpu-docker" (or "gpu-local" to try out).'
        return Finding(name, Status.FAIL, text, remedy), hub
    return Finding(name, Status.OK, f"{settings.file}, servers by {kind}"), hub


def _catalog(hub: Hub) -> tuple[Finding, Catalog | None]:
    name, path = "catalog", str(hub.spawner.catalog)
    if not path:
        text = "No catalog is set: there is one environment, the spawner's own image"
        return Finding(name, Status.OK, text), None
    try:
        catalog = load(path)
    except GPUSpawnerError as error:
        remedy = "Correct it: until then servers do not start."
        return Finding(name, Status.FAIL, error.message, remedy), None
    text = f"{path}: {count(len(catalog.environments), 'environment')}"
    return Finding(name, Status.OK, text), catalog


def _cluster(hub: Hub) -> tuple[Finding, Cluster | None]:
    name, path = "cluster", hub.cluster_file
    try:
        cluster = read_cluster(path)
    except GPUSpawnerError as error:
        remedy = "Correct it, or write it anew with gpuspawner slurm config."
        return Finding(name, Status.FAIL, error.message, remedy), None
    devices = sum(len(node.devices) for node in cluster.nodes)
    text = f"{path}: {count(len(cluster.nodes), 'node')}, {count(devices, 'device')}"
    return Finding(name, Status.OK, text), cluster


def _too_old(catalog: Catalog, inventory: Inventory) -> str:
    """The first environment that this machine's driver is too old for, in words; else empty."""
    for environment in catalog.environments:
        request = Request(
            devices=1,
            environment=environment.slug,
            min_driver=environment.min_driver,
            min_cuda=environment.min_cuda,
        )
        try:
            must_run(request, inventory)
        except TooMuchAsked as error:
            return error.message.partition(". ")[0] + "."
    return ""


# Devices.


def _devices(settings: Settings, readable: bool) -> tuple[Finding, Inventory]:
    name = "devices"
    try:
        broker = settings.open_broker() if readable else None
        seen, health = look(settings, broker), broker.health() if broker else {}
    except GPUSpawnerError as error:
        nothing = Inventory(devices=(), observed_at=utcnow())
        remedy = "Set c.Broker.device_source." if isinstance(error, ConfigError) else ""
        return Finding(name, Status.FAIL, error.message, remedy), nothing
    inventory, views = seen.inventory, seen.views
    if inventory.error:
        text = f"No GPU can be seen: {inventory.error}"
        return Finding(name, Status.FAIL, text, NO_GPU), inventory
    text = f"{_source(inventory)}: {_states(views)}"
    unknown = [view for view in views if view.device.status is DeviceStatus.UNKNOWN]
    if unknown:
        why = ". ".join(f"{v.device.index} ({v.device.uuid}): {v.detail}" for v in unknown)
        remedy = f"Unknown devices are not leased. {why}. See nvidia-smi and journalctl -k."
        return Finding(name, Status.FAIL, text, remedy), inventory
    sick = [view for view in views if _is_sick(health.get(view.device.uuid))]
    if sick:
        why = ". ".join(f"{v.device.index} ({v.device.uuid}): {v.detail}" for v in sick)
        remedy = f"Sick devices come back after a probe, or by gpuspawner undrain. {why}."
        text += f"; {count(len(sick), 'device')} sick"
        return Finding(name, Status.FAIL, text, remedy), inventory
    if not any(view.state in COUNTED for view in views):
        return Finding(name, Status.FAIL, text, "There is no device to lease."), inventory
    occupied = [view for view in views if view.state == "occupied"]
    remedy = " ".join(f"Device {v.device.index} is {v.detail}: end that." for v in occupied)
    return Finding(name, Status.OK, text, remedy), inventory


def _is_sick(known: Known | None) -> bool:
    return known is not None and known.state.verdict == SICK


def _source(inventory: Inventory) -> str:
    if inventory.source == "simulated":
        return "Simulated"
    return f"NVML, driver {inventory.driver_version}, CUDA {inventory.cuda_version}"


def _states(views: Sequence[DeviceView]) -> str:
    """``4 devices (2 free, 1 leased, 1 occupied: 3)``."""
    parts = []
    for state, group in Counter(view.state for view in views).items():
        part = f"{group} {state}"
        if state in ("occupied", "unknown"):
            part += ": " + ", ".join(str(v.device.index) for v in views if v.state == state)
        parts.append(part)
    total = count(len(views), "device")
    return f"{total} ({', '.join(parts)})" if parts else "no devices"


# What it looks like.


def line_of(finding: Finding, coloured: bool | None = None) -> str:
    """A finding for people, in colour where somebody looks."""
    coloured = _coloured() if coloured is None else coloured
    word = f"{WORDS[finding.status]:<{WORD_WIDTH}}"
    if coloured:
        word = f"{COLOURS[finding.status]}{word}{PLAIN}"
    line = f"{word}  {finding.name:<{NAME_WIDTH}}  {printable(finding.text)}"
    if finding.remedy:
        indent = " " * (WORD_WIDTH + NAME_WIDTH + 4)
        line += f"\n{indent}-> {printable(finding.remedy)}"
    return line


def _summary(found: Sequence[Finding]) -> str:
    counts = Counter(finding.status for finding in found)
    parts = [f"{counts[status]} {WORDS[status]}" for status in WORDS if counts[status]]
    return ", ".join(parts) + "."


def _coloured() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


@contextmanager
def _ended_cleanly() -> Iterator[None]:
    """Let SIGTERM unwind as Ctrl-C does, so that containers are removed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
