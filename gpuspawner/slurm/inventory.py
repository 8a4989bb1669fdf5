"""What a host says it has (``gpuspawner slurm inventory``), and the node that becomes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..core.config_files import Origin, Section, shown, text, whole
from ..core.errors import ConfigError
from .cluster import NODE_NAME, TLS, Node, NodeDevice, gres_types, layout

MOST_BYTES = 1_000_000
"""The longest inventory that is read."""

_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{3,94}")
_FILE = re.compile(r"(?:/[A-Za-z0-9._-]+)+")


@dataclass(frozen=True, kw_only=True)
class HostInventory:
    """One host's."""

    hostname: str
    """As ``hostname -s`` says it: slurmd looks for itself by this name."""
    cpus: int
    memory_bytes: int
    layout: str = ""
    slurm: str = ""
    """The version of slurmd; empty when it is not there."""
    engine: str = ""
    """The version of the Docker Engine; empty when none answers."""
    driver: str = ""
    devices: tuple[NodeDevice, ...] = ()
    """In the order of their files."""

    def to_json(self) -> str:
        """What :func:`read_inventory` reads."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)

    def node(self, address: str, engine: str, tls: TLS | None = None) -> Node:
        """The node that this host is; ``address`` is where the hub reaches it."""
        return Node(
            name=self.hostname,
            address=address,
            engine=engine,
            tls=tls,
            devices=self.devices,
            cpus=self.cpus,
            memory_bytes=self.memory_bytes,
            layout=self.layout,
        )


def read_inventory(written: str, name: str) -> HostInventory:
    """An inventory as a host wrote it. Raises ConfigError, with ``name`` for where it comes
    from."""
    if len(written) > MOST_BYTES:
        raise ConfigError(f"{name} has more than {MOST_BYTES} characters: this is no inventory.")
    try:
        data = json.loads(written)
    except (ValueError, RecursionError):
        begins = shown(written.strip()[:50])
        raise ConfigError(
            f"{name}: this is not what gpuspawner slurm inventory writes; it begins with {begins}."
        ) from None
    top = Section(data, Origin(name), (), "the inventory")
    found = HostInventory(
        hostname=top.take("hostname", _hostname),
        cpus=top.take("cpus", _one_or_more),
        memory_bytes=top.take("memory_bytes", _bytes),
        layout=top.take("layout", lambda value: layout(value) if value else "", ""),
        slurm=top.take("slurm", _line, ""),
        engine=top.take("engine", _line, ""),
        driver=top.take("driver", _line, ""),
        devices=tuple(_devices(top)),
    )
    top.done()
    return found


def _devices(top: Section) -> list[NodeDevice]:
    found = []
    nothing: list[Any] = []
    for index, data in enumerate(top.take("devices", _listed, nothing)):
        inner = Section(data, top.origin, ("devices", index), f"device {index} of the inventory")
        inner.take("gres", _line, "")  # which name it gets depends on the other hosts
        device = NodeDevice(
            uuid=inner.take("uuid", _uuid),
            model=inner.take("model", _line),
            memory_bytes=inner.take("memory_bytes", _bytes),
            file=inner.take("file", _line, ""),
        )
        inner.done()
        if device.uuid.startswith("MIG-"):
            raise ConfigError(
                f"{top.origin.name}: device {index} is a MIG instance, which gpuspawner slurm "
                "config does not write. Leave MIG mode (nvidia-smi -mig 0), or write gres.conf and "
                "cluster.yaml by hand."
            )
        if not _FILE.fullmatch(device.file):
            raise inner.error("file", f"'file' of {inner.label} is {shown(device.file)}, no path.")
        found.append(device)
    return found


def with_gres_types(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes with Slurm's words for their devices' models, which tell them apart; devices of
    one word follow each other."""
    types = gres_types(device.model for node in nodes for device in node.devices)
    found = []
    for node in nodes:
        devices = [replace(device, gres=types[device.model]) for device in node.devices]
        order = list(dict.fromkeys(device.gres for device in devices))
        devices.sort(key=lambda device: order.index(device.gres))
        found.append(replace(node, devices=tuple(devices)))
    return tuple(found)


def _hostname(value: object) -> str:
    found = text(value)
    if not NODE_NAME.fullmatch(found):
        raise ValueError(f"is {shown(found)}. Give the host a short name of letters, digits and -.")
    return found


def _uuid(value: object) -> str:
    found = text(value)
    if not _UUID.fullmatch(found):
        raise ValueError(f"is {shown(found)}, which is no UUID.")
    return found


def _line(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable() or len(value) > 200:
        raise ValueError(f"is {shown(value)}, not one line of text.")
    return value.strip()


def _one_or_more(value: object) -> int:
    if (found := whole(value)) < 1:
        raise ValueError("is 0. Write 1 or more.")
    return found


def _bytes(value: object) -> int:
    if type(value) is not int or not 2**20 <= value < 2**60:
        raise ValueError(f"is {shown(value)}, no number of bytes.")
    return value


def _listed(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"is {shown(value)}, not a list.")
    return value
