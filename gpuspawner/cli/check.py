"""The command ``gpuspawner check``: checks that a hub has everything it needs."""

from __future__ import annotations

import ast
import copy
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from types import FrameType
from typing import Any

import click

from ..catalog.loader import Catalog, load
from ..core.errors import ConfigError, GPUSpawnerError, TooMuchAsked
from ..devices.commands import look
from ..devices.models import DeviceStatus, Inventory
from ..devices.snapshots import COUNTED, DeviceView
from ..devices.suitability import must_run
from ..engines.preflight import CheckFinding, Status
from ..leases.models import Request
from ..ledger.prices import PART_OF_A_GPU, unnamed_instances
from ..monitoring.health import SICK
from ..services import utcnow
from ..slurm.cluster import Cluster, read_cluster
from . import DEFAULT_FILE
from .check_hub import check_database
from .command import command, wants_json
from .config import Settings
from .hub import HubSettings
from .output import count, printable, show
from .parameters import flag

BASES = {"GPUDockerSpawner": "docker", "GPUSlurmSpawner": "slurm", "GPULocalSpawner": "local"}
"""Our classes, and their modules in gpuspawner.spawners."""


NO_LOSS = {*BASES, "DockerSpawner", "LocalProcessSpawner", "SimpleLocalProcessSpawner"}
"""Classes that define nothing of the admin's own."""


def check_spawner_class(file: str | Path, hub: HubSettings) -> Iterator[CheckFinding]:
    """Yield a red finding for a spawner class whose form, hooks and settings have no effect."""
    kind = type(hub.spawner).__name__
    replaced = [name for name in _replaced_classes(Path(file)) if name not in hub.kinds]
    if "SystemUserSpawner" in hub.app.config and "SystemUserSpawner" not in hub.kinds:
        replaced.append("SystemUserSpawner")
    ours = next((name for name in BASES if name in hub.kinds), "GPUDockerSpawner")
    for name in dict.fromkeys(replaced):
        text = f"{kind} replaces {name}, whose own code and settings have no effect."
        remedy = (
            f"from gpuspawner.spawners.{BASES[ours]} import {ours}; "
            f"class GPU{name}({ours}, {name}): pass; "
            f"c.JupyterHub.spawner_class = GPU{name}."
        )
        yield CheckFinding("spawner class", Status.FAIL, text, remedy)


def _replaced_classes(file: Path) -> list[str]:
    """Return the names of the admin's own and DockerSpawner's classes that the file sets first."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []  # the finding about the configuration reports it
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    found = [
        _class_name(node.value)
        for node in sorted(assigned, key=lambda node: node.lineno)
        if any(ast.unparse(target).endswith(".JupyterHub.spawner_class") for target in node.targets)
    ]
    return [name for name in found[:-1] if name]


def _class_name(value: ast.expr) -> str:
    """Return the class that a value of ``spawner_class`` names; empty if it may be replaced."""
    path = ast.unparse(value)
    if isinstance(value, ast.Constant):
        known = {e.name: e.value for e in entry_points(group="jupyterhub.spawners")}
        path = known.get(str(value.value), str(value.value)).replace(":", ".")
        if "." not in path:
            return ""  # no class: JupyterHub reports it
    name = path.rpartition(".")[2]
    return name if name.isidentifier() and name not in NO_LOSS else ""


PRODUCTION = "gpuspawner.spawners.docker.GPUDockerSpawner"
"""The spawner that is checked without a configuration."""

NEED_HUB = (
    *("engine", "image", "GPU injection", "hub API", "disk limit", "workspace"),
    *("proxy", "accounting", "idle culler"),
)
NO_GPU = (
    "Install NVIDIA's driver and see that nvidia-smi lists the GPUs. To try out without any: "
    'c.GPUDevices.source = "simulated:4xA100-80GB".'
)

WORDS = {Status.OK: "ok", Status.FAIL: "FAIL", Status.UNCHECKED: "not checked"}
COLOURS = {Status.OK: "green", Status.FAIL: "red", Status.UNCHECKED: "yellow"}
WORD_WIDTH, NAME_WIDTH = 11, 14


@command()
@flag("--no-containers", "start no containers, and skip the checks that need one")
def check(settings: Settings, no_containers: bool) -> int:
    """Run every check. Returns 1 if one fails."""
    settings.require_hub()
    found = []
    with _ended_cleanly():
        for finding in findings(settings, containers=not no_containers):
            found.append(finding)
            if not wants_json():
                print(line_of(finding), flush=True)
    ok = all(finding.status is not Status.FAIL for finding in found)
    checks: list[dict[str, Any]] = [asdict(f) | {"status": f.status.value} for f in found]
    counts = Counter(finding.status for finding in found)
    summary = ", ".join(f"{counts[status]} {WORDS[status]}" for status in WORDS if counts[status])
    show({"ok": ok, "checks": checks}, f"\n{summary}.")
    return 0 if ok else 1


def findings(settings: Settings, *, containers: bool = True) -> Iterator[CheckFinding]:
    """Yield every check, in the order of their dependencies."""
    # JupyterHub is imported here, after the first output of the other commands: it is slow.
    from .check_host import check_host
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
        is_broken = finding.status is Status.FAIL
        finding, inventory = _devices(settings, readable, is_broken)
    yield finding
    if readable and inventory.devices:
        yield from _whatever_happens("MIG layouts", _mig_layouts(settings, inventory))
        yield from _whatever_happens("MIG prices", _mig_prices(settings, inventory))
    if catalog is not None and (old := _too_old(catalog, inventory)):
        yield CheckFinding(
            "driver", Status.FAIL, old, "Install a newer driver, or change the entry."
        )
    if hub is not None and hub.leases_gpus and not hub.cluster_file:
        host = check_host(hub, catalog, settings.services.host, inventory)
        yield from _whatever_happens("host budget", host)
    if hub is None:
        for name in NEED_HUB:
            yield CheckFinding(name, Status.UNCHECKED, "The configuration is not valid.")
        return
    if hub.uses_docker:
        yield from _whatever_happens("servers", check_docker(hub, catalog, inventory, containers))
    else:
        yield from _whatever_happens("servers", check_local(hub))
    if cluster is not None:
        yield from _whatever_happens("cluster", check_slurm(hub, catalog, cluster, containers))
    yield from _whatever_happens("proxy", check_proxy(hub))
    yield from _whatever_happens("services", check_services(hub))


def _whatever_happens(name: str, steps: Iterator[CheckFinding]) -> Iterator[CheckFinding]:
    """Yield the findings of some steps; one that breaks is red and hides no other."""
    try:
        yield from steps
    except Exception as error:
        text = f"This check crashed ({type(error).__name__}: {error})."
        yield CheckFinding(name, Status.FAIL, text, "Please report it: that should not happen.")


# Configuration and catalog.


def _configuration(settings: Settings) -> tuple[CheckFinding, HubSettings | None]:
    from .hub import open_hub

    name, config = "configuration", settings.config
    if settings.file is None:
        config = copy.deepcopy(config)
        config.JupyterHub.spawner_class = PRODUCTION
    try:
        hub = open_hub(config)
    except ConfigError as error:
        remedy = f"Correct {settings.file}: the hub would not start with it."
        return CheckFinding(name, Status.FAIL, error.message, remedy), None
    kind = type(hub.spawner).__name__
    if settings.file is None:
        text = f"There is no {DEFAULT_FILE} here (-f names one): checking what {kind} needs."
        return CheckFinding(name, Status.UNCHECKED, text), hub
    if not hub.leases_gpus:
        text = f"{settings.file}: its spawner {kind} leases no GPUs."
        remedy = 'Set c.JupyterHub.spawner_class = "gpu-docker" (or "gpu-local" to try out).'
        return CheckFinding(name, Status.FAIL, text, remedy), hub
    return CheckFinding(name, Status.OK, f"{settings.file}, servers by {kind}"), hub


def _catalog(hub: HubSettings) -> tuple[CheckFinding, Catalog | None]:
    name, path = "catalog", str(hub.spawner.catalog)
    if not path:
        text = "No catalog is set: there is one environment, the spawner's own image"
        return CheckFinding(name, Status.OK, text), None
    try:
        catalog = load(path)
    except GPUSpawnerError as error:
        remedy = "Correct it: until then servers do not start."
        return CheckFinding(name, Status.FAIL, error.message, remedy), None
    text = f"{path}: {count(len(catalog.environments), 'environment')}"
    return CheckFinding(name, Status.OK, text), catalog


def _cluster(hub: HubSettings) -> tuple[CheckFinding, Cluster | None]:
    name, path = "cluster", hub.cluster_file
    try:
        cluster = read_cluster(path)
    except GPUSpawnerError as error:
        remedy = "Correct it, or write it again with gpuspawner slurm config."
        return CheckFinding(name, Status.FAIL, error.message, remedy), None
    devices = sum(len(node.devices) for node in cluster.nodes)
    text = f"{path}: {count(len(cluster.nodes), 'node')}, {count(devices, 'device')}"
    return CheckFinding(name, Status.OK, text), cluster


def _too_old(catalog: Catalog, inventory: Inventory) -> str:
    """Describe the first environment that this machine's driver is too old for; "" if none."""
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


def _devices(settings: Settings, readable: bool, is_broken: bool) -> tuple[CheckFinding, Inventory]:
    name = "devices"
    try:
        services = settings.open_services() if readable else None
        inventory, views = look(settings, services)
        health = services.health.device_states() if services else {}
    except GPUSpawnerError as error:
        nothing = Inventory(devices=(), observed_at=utcnow())
        remedy = "Set c.GPUDevices.source." if isinstance(error, ConfigError) else ""
        return CheckFinding(name, Status.FAIL, error.message, remedy), nothing
    if inventory.error:
        text = f"No GPU can be seen: {inventory.error}"
        return CheckFinding(name, Status.FAIL, text, NO_GPU), inventory
    text = f"{_source(inventory)}: {_states(views)}"
    unknown = [view for view in views if view.device.status is DeviceStatus.UNKNOWN]
    if unknown:
        why = ". ".join(f"{v.device.index} ({v.device.uuid}): {v.detail}" for v in unknown)
        remedy = f"Unknown devices are not leased. {why}. See nvidia-smi and journalctl -k."
        return CheckFinding(name, Status.FAIL, text, remedy), inventory
    sick_uuids = {uuid for uuid, known in health.items() if known.state.verdict == SICK}
    sick = [view for view in views if view.device.uuid in sick_uuids]
    if sick:
        why = ". ".join(f"{v.device.index} ({v.device.uuid}): {v.detail}" for v in sick)
        remedy = f"Sick devices come back after a probe, or by gpuspawner undrain. {why}."
        text += f"; {count(len(sick), 'device')} sick"
        return CheckFinding(name, Status.FAIL, text, remedy), inventory
    if not any(view.state in COUNTED for view in views):
        return CheckFinding(name, Status.FAIL, text, "There is no device to lease."), inventory
    if is_broken:
        text += "; which are leased or sick is not known without the database"
        return CheckFinding(name, Status.UNCHECKED, text), inventory
    occupied = [view for view in views if view.state == "occupied"]
    remedy = " ".join(f"Device {v.device.index} is {v.detail}: end that." for v in occupied)
    return CheckFinding(name, Status.OK, text, remedy), inventory


def _mig_layouts(settings: Settings, inventory: Inventory) -> Iterator[CheckFinding]:
    """Yield a finding if gpuspawner has divided GPUs."""
    mig, name = settings.open_services().mig, "MIG layouts"
    index = {device.uuid: device.index for device in inventory.devices}
    if missing := mig.missing_instances(inventory):
        gone = "; ".join(
            f"GPU {index[uuid]}: {', '.join(each.name for each in some)}"
            for uuid, some in missing.items()
        )
        text = f"Instances are gone, as after a restart of the machine. {gone}"
        yield CheckFinding(name, Status.FAIL, text, "As root: gpuspawner mig restore")
    elif stopped := mig.stopped_changes():
        text = "; ".join(f"{each.gpu_uuid}: {each.layout} is not complete" for each in stopped)
        remedy = "As root: gpuspawner mig show, then the same gpuspawner mig apply again."
        yield CheckFinding(name, Status.FAIL, text, remedy)
    elif count_of := mig.count_recorded():
        yield CheckFinding(name, Status.OK, f"{count(count_of, 'instance')} made by gpuspawner")


def _mig_prices(settings: Settings, inventory: Inventory) -> Iterator[CheckFinding]:
    """Yield a finding if MIG instances cost their part of a GPU's rate, which upgrades changed."""
    prices = settings.open_services().prices
    if some := unnamed_instances(prices.rates, inventory.devices):
        text = f"{PART_OF_A_GPU}: {'; '.join(some)}"
        remedy = "For another price: gpuspawner rates set 'A100 MIG 1g.5gb' 0.5"
        yield CheckFinding("MIG prices", Status.OK, text, remedy)


def _source(inventory: Inventory) -> str:
    if inventory.source == "simulated":
        return "Simulated"
    return f"NVML, driver {inventory.driver_version}, CUDA {inventory.cuda_version}"


def _states(views: Sequence[DeviceView]) -> str:
    """Format the states of devices: ``4 devices (2 free, 1 leased, 1 occupied: 3)``."""
    parts = []
    for state, group in Counter(view.state for view in views).items():
        part = f"{group} {state}"
        if state in ("occupied", "unknown"):
            part += ": " + ", ".join(str(v.device.index) for v in views if v.state == state)
        parts.append(part)
    total = count(len(views), "device")
    return f"{total} ({', '.join(parts)})" if parts else "no devices"


# Output.


def line_of(finding: CheckFinding) -> str:
    """Format a finding for people, in colour on a terminal."""
    word = f"{WORDS[finding.status]:<{WORD_WIDTH}}"
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        word = click.style(word, fg=COLOURS[finding.status])
    line = f"{word}  {finding.name:<{NAME_WIDTH}}  {printable(finding.text)}"
    if finding.remedy:
        indent = " " * (WORD_WIDTH + NAME_WIDTH + 4)
        line += f"\n{indent}-> {printable(finding.remedy)}"
    return line


@contextmanager
def _ended_cleanly() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that containers are removed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
