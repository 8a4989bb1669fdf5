"""The commands ``gpuspawner slurm inventory``, ``sync`` and ``audit``."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated

import docker
from docker.errors import DockerException
from pydantic import AfterValidator, Field
from requests import RequestException

from ..cli.command import command
from ..cli.config import Settings
from ..cli.output import count, exact, local, note, printable, show, table, utc
from ..cli.parameters import flag, option
from ..core.config_files import Origin, shown
from ..core.config_models import Checked, ConfigModel, read_model
from ..core.errors import ConfigError, GPUSpawnerError, InvalidRequest
from ..devices.discovery import open_source
from ..devices.models import Device, DeviceStatus, Inventory
from ..ledger.pricing import parse_moment
from ..services import Services, utcnow
from . import accounts
from .cluster import LAYOUT, Cpus, DeviceUUID, FilePath, HostName, Node, NodeDevice, gres_types
from .job_billing import SessionDifference
from .programs import Slurm
from .repository import BatchJob

MOST_BYTES = 1_000_000
"""The maximum length of an inventory."""


@dataclass(frozen=True, kw_only=True)
class HostInventory:
    """The inventory of one host."""

    hostname: str
    """As printed by ``hostname -s``: slurmd finds itself by this name."""
    cpus: int
    memory_bytes: int
    layout: str = ""
    slurm: str = ""
    """The version of slurmd; empty if it is not installed."""
    engine: str = ""
    """The version of the Docker Engine; empty if none answers."""
    driver: str = ""
    devices: tuple[NodeDevice, ...] = ()
    """In the order of their files."""

    def to_json(self) -> str:
        """Return the JSON that :func:`read_inventory` reads."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)


def _line(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable() or len(value) > 200:
        raise ValueError(f"is {shown(value)}, not a single line of text.")
    return value.strip()


def _require_whole(uuid: str) -> str:
    if uuid.startswith("MIG-"):
        raise ValueError(
            f"is {uuid}, a MIG instance, which gpuspawner slurm config does not support. Turn MIG "
            "mode off (nvidia-smi -mig 0), or write gres.conf and cluster.yaml by hand."
        )
    return uuid


Words = Annotated[str, Checked(_line)]
"""One line, which may be empty."""
Bytes = Annotated[int, Field(ge=2**20, lt=2**60)]


class InventoryDevice(ConfigModel):
    """A device of the host."""

    uuid: Annotated[DeviceUUID, AfterValidator(_require_whole)]
    model: Words
    memory_bytes: Bytes
    file: FilePath
    gres: Words = ""
    """Which name it gets depends on the other hosts."""


class InventoryFile(ConfigModel):
    """What a host writes."""

    hostname: HostName
    cpus: Cpus
    memory_bytes: Bytes
    layout: Annotated[str, Checked(lambda value: LAYOUT.check(value) if value else "")] = ""
    slurm: Words = ""
    engine: Words = ""
    driver: Words = ""
    devices: list[InventoryDevice] = []


def read_inventory(written: str, name: str) -> HostInventory:
    """Parse an inventory as a host wrote it.

    Raises ConfigError, with ``name`` for where it comes from.
    """
    if len(written) > MOST_BYTES:
        raise ConfigError(
            f"{name} has more than {MOST_BYTES} characters: this is not an inventory."
        )
    try:
        data = json.loads(written)
    except (ValueError, RecursionError):
        begins = shown(written.strip()[:50])
        raise ConfigError(
            f"{name}: this is not what gpuspawner slurm inventory writes; it begins with {begins}."
        ) from None
    found = dict(
        read_model(InventoryFile, data, Origin(name), "the inventory", {"devices": "device"})
    )
    devices = tuple(
        NodeDevice(device.uuid, device.model, device.memory_bytes, device.file)
        for device in found.pop("devices")
    )
    return HostInventory(**found, devices=devices)


def with_gres_types(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return the nodes with unique Slurm types for their devices' models.

    Devices of the same type are adjacent.
    """
    types = gres_types(device.model for node in nodes for device in node.devices)
    found = []
    for node in nodes:
        devices = [replace(device, gres=types[device.model]) for device in node.devices]
        order = list(dict.fromkeys(device.gres for device in devices))
        devices.sort(key=lambda device: order.index(device.gres))
        found.append(replace(node, devices=tuple(devices)))
    return tuple(found)


SECONDS = 20.0
DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")
_MINOR = re.compile(r"^Device Minor:\s*(\d+)$", re.MULTILINE)
_LAYOUT = ("Boards", "SocketsPerBoard", "CoresPerSocket", "ThreadsPerCore")


@command("inventory")
def print_inventory(settings: Settings) -> None:
    """Print what this machine can add to a cluster, as JSON."""
    print(this_host(settings).to_json())


def this_host(settings: Settings) -> HostInventory:
    """Return what this machine has. Raises ConfigError if its GPUs cannot be seen."""
    seen = open_source(settings.services.devices.source).observe(utcnow())
    if seen.error:
        raise ConfigError(f"No GPU of this machine can be seen: {seen.error}")
    hardware = _hardware()
    memory = int(hardware.get("RealMemory", "0")) * 2**20
    return HostInventory(
        hostname=socket.gethostname().partition(".")[0],
        cpus=int(hardware.get("CPUs", "0")) or os.cpu_count() or 1,
        memory_bytes=memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        layout=" ".join(f"{word}={hardware[word]}" for word in _LAYOUT if word in hardware),
        slurm=_asked("slurmd", "-V").removeprefix("slurm-wlm ").removeprefix("slurm ").strip(),
        engine=_engine(),
        driver=seen.driver_version,
        devices=tuple(node_devices(seen)),
    )


def node_devices(seen: Inventory, gpus: Path = DRIVER_GPUS) -> list[NodeDevice]:
    """Return the devices in the order of their files.

    A device that is not responding is an error: Slurm counts by position, and would mistake those
    behind it for others.
    """
    silent = [d for d in seen.devices if d.status is DeviceStatus.UNKNOWN]
    if silent:
        raise ConfigError(
            f"The GPU {silent[0].index} is not responding: {silent[0].reason} Repair it or remove "
            "it first."
        )
    whole = [d for d in seen.devices if d.status is not DeviceStatus.PARENT]
    numbered = [(_minor(device, gpus), device) for device in whole]
    if len({minor for minor, _ in numbered}) < len(numbered):
        numbered = [(device.index, device) for device in whole]
    numbered.sort(key=lambda pair: pair[0])
    return [
        NodeDevice(device.uuid, device.model, device.memory_bytes, f"/dev/nvidia{minor}")
        for minor, device in numbered
    ]


def _minor(device: Device, gpus: Path) -> int:
    """Return N of the GPU's /dev/nvidiaN: the driver's own number, not always NVML's."""
    domain, _, rest = device.pci_bus_id.lower().partition(":")
    try:
        told = (gpus / f"{domain[-4:]}:{rest}" / "information").read_text(encoding="utf-8")
    except OSError:
        return device.index
    found = _MINOR.search(told)
    return int(found[1]) if found else device.index


def _hardware() -> dict[str, str]:
    """Return what slurmd detects on this machine, in slurm.conf's words; empty without slurmd."""
    first = _asked("slurmd", "-C").partition("\n")[0]
    return dict(word.split("=", 1) for word in first.split() if "=" in word)


def _asked(program: str, *words: str) -> str:
    try:
        return Slurm(seconds=SECONDS, folder=_folder(program)).run(program, *words)
    except GPUSpawnerError:
        return ""


def _folder(program: str) -> str:
    """Return the folder with a program that only root has on its PATH."""
    return next((f for f in ("/usr/sbin", "/usr/local/sbin") if os.access(f"{f}/{program}", 1)), "")


def _engine() -> str:
    try:
        return str(docker.from_env(timeout=5).version()["Version"])
    except (DockerException, RequestException, OSError, KeyError):
        return ""


# Other hosts.


def fetched(host: str) -> str:
    """Return the output of ``gpuspawner slurm inventory`` on another host, through ssh.

    Raises ConfigError.
    """
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "--", host]
    remedy = f"Run it there by hand and name the file: {host}=FILE."
    try:
        done = subprocess.run(
            [*ssh, "gpuspawner", "slurm", "inventory"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{host} cannot be queried without ssh: install it here. {remedy}"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{host} did not respond within 60 seconds. {remedy}") from None
    if done.returncode:
        said = " ".join(done.stderr.split())[-300:] or f"ssh ended with {done.returncode}"
        raise ConfigError(
            f"gpuspawner slurm inventory failed on {host}: {said.rstrip('.')}. {remedy}"
        )
    return done.stdout


TRIES = 3
"""How often a change is repeated that Slurm's database does not keep."""

DAYS = 7
"""How far back an audit looks by default."""


@command()
@flag("--dry-run", "show what would be done, and change nothing")
def sync(settings: Settings, dry_run: bool) -> int:
    """Update Slurm's accounts, shares and limits to match the hub's."""
    services = settings.open_services()
    plan = services.cluster_members.plan_for_cluster()
    problems = plan.problems
    if plan.steps and not dry_run:
        problems = _done(services, plan)
    value = {
        "done": not dry_run,
        "steps": [{"what": s.what, "sacctmgr": list(s.words)} for s in plan.steps],
        "problems": list(problems),
    }
    lines = [printable(step.what) for step in plan.steps]
    if not plan.steps:
        lines.append("Slurm knows every member and group as the hub does: nothing to do.")
    else:
        steps = count(len(plan.steps), "step")
        lines += ["", f"{'Would do' if dry_run else 'Did'} {steps}."]
    show(value, "\n".join(lines))
    for problem in problems:
        note(printable(problem))
    return 1 if problems else 0


def _done(services: Services, plan: accounts.SyncPlan) -> tuple[str, ...]:
    """Carry out the plan, check the result, and return what could not be done.

    Slurm's database may forget a part of a change that comes at the same time as others.
    """
    for _ in range(TRIES):
        accounts.apply_plan(services.cluster_members.slurm(), plan.steps)
        plan = services.cluster_members.plan_for_cluster()
        if not plan.steps:
            return plan.problems
    return (*plan.problems, "Slurm's database did not store the changes: run the command again.")


@command()
@option(
    "--since",
    "WHEN",
    f"compare sessions that ended since this date, such as 2026-10-01 (default: {DAYS} days ago)",
    "since_text",
    default="",
)
def audit(settings: Settings, since_text: str) -> int:
    """Compare sessions with Slurm's jobs, to the second."""
    services = settings.open_services()
    until = services.clock()
    since = _since(since_text, services.settings.rates.zone, until)
    sessions, found = services.cluster_audit.audit_cluster(since, until)
    jobs = services.job_billing.jobs_since(services.cluster_members.nodes().name, since)
    strangers = [job for job in jobs if job.member is None]
    value = {
        "ok": not found,
        "since": utc(since),
        "sessions": sessions,
        "differences": [
            {"subject": d.subject, "what": d.what, "ours": d.ours, "slurm": d.theirs} for d in found
        ],
        "batch_jobs": len(jobs) - len(strangers),
        "batch_charged": exact(sum(job.charged for job in jobs)),
        "of_nobody": [
            {
                "job": job.label,
                "user": job.user,
                "devices": job.devices,
                "seconds": job.seconds,
                "started_at": utc(job.started_at),
            }
            for job in strangers
        ],
    }
    show(value, _text(sessions, found, jobs, strangers, since))
    return 1 if found else 0


def _text(
    sessions: int,
    found: Sequence[SessionDifference],
    jobs: Sequence[BatchJob],
    strangers: Sequence[BatchJob],
    since: datetime,
) -> str:
    lines = [f"DIFFERS  {printable(str(each))}" for each in found]
    if strangers:
        rows = [
            (j.label, j.user, j.devices, str(j.seconds), local(j.started_at)) for j in strangers
        ]
        headers = ("JOB", "USER", "DEVICES", "SECONDS", "STARTED")
        lines += ["Jobs of users who are not members (not charged):"]
        lines += [table(headers, rows, right=("SECONDS",)), ""]
    said = f"{len(found)} differ from Slurm's jobs" if found else "all as Slurm's jobs say"
    charged = exact(sum(job.charged for job in jobs))
    lines.append(
        f"{count(sessions, 'session')} since {local(since)}: {said}. "
        f"{count(len(jobs) - len(strangers), 'batch job')} of members paid {charged} credits."
    )
    return "\n".join(lines)


def _since(text: str, zone: str, now: datetime) -> datetime:
    """Parse the start of an audit. Raises InvalidRequest."""
    if not text:
        return now - timedelta(days=DAYS)
    try:
        moment = parse_moment(text, zone)
    except ValueError as error:
        raise InvalidRequest(f"--since: {error}", field="since") from None
    if moment >= now:
        raise InvalidRequest(f"--since: {text} is in the future.", field="since")
    return moment
