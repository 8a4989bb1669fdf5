"""A host's inventory (``gpuspawner slurm inventory``), and the node made from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

from pydantic import AfterValidator, Field

from ..core.config_files import Origin, shown
from ..core.config_models import Checked, ConfigModel, read_model
from ..core.errors import ConfigError
from .cluster import LAYOUT, Cpus, DeviceUUID, FilePath, HostName, Node, NodeDevice, gres_types

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
        raise ValueError(f"is {shown(value)}, not one line of text.")
    return value.strip()


def _require_whole(uuid: str) -> str:
    if uuid.startswith("MIG-"):
        raise ValueError(
            f"is {uuid}, a MIG instance, which gpuspawner slurm config does not write. Leave MIG "
            "mode (nvidia-smi -mig 0), or write gres.conf and cluster.yaml by hand."
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
        raise ConfigError(f"{name} has more than {MOST_BYTES} characters: this is no inventory.")
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
