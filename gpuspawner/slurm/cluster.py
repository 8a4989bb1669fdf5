"""The cluster file: nodes, their engines, and Slurm's names of their GPUs."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, model_validator

from ..core.config_files import Origin, read_text, read_yaml, shown
from ..core.config_models import (
    MOST_WHOLE,
    Checked,
    ConfigModel,
    DeviceMemory,
    Size,
    matching,
    mistake,
    read_model,
    text,
)
from ..core.errors import ConfigError

GRES_TYPE = r"[a-z0-9](?:[a-z0-9_-]{0,62})"
"""What Slurm takes as the type of a device."""

_MAKERS_WORDS = frozenset(
    ("nvidia", "tesla", "geforce", "quadro", "graphics", "device", "generation")
)


def gres_type(model: str) -> str:
    """Return Slurm's type of a model: ``a100`` for ``NVIDIA A100-SXM4-80GB``, ``rtx-4090``."""
    kept: list[str] = []
    for word in _words(model):
        kept.append(word)
        if any(character.isdigit() for character in word):
            break
    return "-".join(kept)[:63] or "gpu"


def gres_types(models: Iterable[str]) -> dict[str, str]:
    """Return a unique Slurm type for each model.

    Models that would share one get their full names.
    """
    short = {model: gres_type(model) for model in sorted(set(models))}
    often = Counter(short.values())
    found: dict[str, str] = {}
    for model, word in short.items():
        wanted = word if often[word] == 1 else "-".join(_words(model))[:58] or word
        number = 1
        while (name := wanted if number == 1 else f"{wanted[:58]}-{number}") in found.values():
            number += 1
        found[model] = name
    return found


def _words(model: str) -> list[str]:
    words = re.findall(r"[a-z0-9]+", model.lower())
    return [word for word in words if word not in _MAKERS_WORDS] or words


MOST_BYTES = 4_000_000
"""The maximum size of the file."""
MOST_SHARDS = 64
"""Maximum shards of one device."""

_NODE_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_FILE = r"(?!.*/\.\.(?:/|$))(?:/[A-Za-z0-9._-]+)+"

NodeName = Annotated[str, matching(_NODE_NAME, "Use letters, digits and -.", is_key=True)]
HostName = Annotated[
    str, matching(_NODE_NAME, "Give the host a short name of letters, digits and -.")
]
ClusterName = Annotated[str, matching(r"[a-z][a-z0-9_]{0,38}", "Use small letters, digits and _.")]
Partition = Annotated[
    str, matching(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}", "Use letters, digits, _ and -.")
]
GresType = Annotated[str, matching(GRES_TYPE, "Use small letters, digits, _ and -.")]
GresKey = Annotated[str, matching(GRES_TYPE, "Use small letters, digits, _ and -.", is_key=True)]
DeviceUUID = Annotated[
    str,
    matching(r"[A-Za-z0-9][A-Za-z0-9-]{3,94}", "Use letters, digits and -, such as GPU-0a1b2c3d."),
]
FilePath = Annotated[
    str, matching(_FILE, "Write a whole path of letters, digits, '.', '_' and '-'.")
]
LAYOUT = matching(
    r"(?:(?:Boards|SocketsPerBoard|CoresPerSocket|ThreadsPerCore)=[1-9][0-9]{0,3}(?: |$))+",
    "Write it as slurmd -C does, such as 'SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=2'.",
)
"""What ``slurmd -C`` says of sockets, cores and threads."""
Cpus = Annotated[int, Field(ge=1, le=MOST_WHOLE)]
Shards = Annotated[int, Field(ge=1, le=MOST_SHARDS)]
"""1: not shared."""


@dataclass(frozen=True, slots=True)
class TLS:
    """The files for mutual TLS between the hub and a node's engine."""

    ca: str
    certificate: str
    key: str


@dataclass(frozen=True, slots=True)
class NodeDevice:
    """A device of a node, with its names in Slurm and in the engine."""

    uuid: str
    model: str
    memory_bytes: int
    file: str = "/dev/nvidia0"
    """The file by which Slurm identifies it; it grants no access here."""
    gres: str = ""
    """Slurm's type of the model, as in ``--gres=gpu:a100:1``."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine with a Docker Engine and devices."""

    name: str
    address: str
    """The IP address on which containers publish their ports, reachable for the hub."""
    engine: str
    """``unix://``, ``ssh://`` or ``https://``."""
    tls: TLS | None = None
    sampler: str = ""
    """The address of its ``gpuspawner slurm sampler``; empty if none runs."""
    devices: tuple[NodeDevice, ...] = ()
    """In the order of Slurm's indices."""
    cpus: int = 1
    memory_bytes: int = 0
    layout: str = ""
    """Sockets, cores and threads in slurm.conf's words; empty leaves them to Slurm."""
    shards: Mapping[str, int] = field(default_factory=dict, hash=False)
    """How many shards each device of a type has; types that are not shared are absent."""

    def slots_of(self, device: NodeDevice) -> int:
        """Return how many servers may share a device: its shards, or 1 if it is not shared."""
        return self.shards.get(device.gres, 1)

    def device_at(self, index: int) -> NodeDevice:
        """Return the device with Slurm's ``index``, from 0. Raises ConfigError."""
        if not 0 <= index < len(self.devices):
            raise ConfigError(
                f"Slurm allocated device {index} of the node {self.name}, but cluster.yaml lists "
                f"only {len(self.devices)} there. Run gpuspawner slurm config again."
            )
        return self.devices[index]

    def client_settings(self) -> dict[str, Any]:
        """Return ``docker.APIClient``'s arguments to reach this node's engine, and no other."""
        settings: dict[str, Any] = {"base_url": self.engine}
        if self.engine.startswith("ssh://"):
            settings["use_ssh_client"] = True  # the machine's own ssh, with its keys and hosts
        if self.tls is not None:
            import docker  # only here: reading a file needs no engine

            settings["tls"] = docker.tls.TLSConfig(
                client_cert=(self.tls.certificate, self.tls.key), ca_cert=self.tls.ca, verify=True
            )
        return settings


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes that Slurm schedules."""

    name: str
    nodes: tuple[Node, ...]
    partition: str = "gpu"
    hub_address: str = ""
    """The hub's address for the nodes."""
    slurm_conf: str = ""
    """Path of slurm.conf; empty for Slurm's default path."""

    @cached_property
    def _nodes(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def _devices(self) -> dict[str, tuple[Node, NodeDevice]]:
        return {device.uuid: (node, device) for node in self.nodes for device in node.devices}

    @property
    def most_shards(self) -> int:
        """The most shards of any device; 1 if none is shared."""
        return max((count for node in self.nodes for count in node.shards.values()), default=1)

    def node(self, name: str) -> Node:
        """Return the node with this name. Raises ConfigError for an unknown one."""
        if (found := self._nodes.get(name)) is None:
            raise ConfigError(
                f"Slurm has the node {name}, which is not in cluster.yaml. Add it: "
                "gpuspawner slurm config."
            )
        return found

    def device(self, uuid: str) -> tuple[Node, NodeDevice] | None:
        """Return the device with this UUID and its node; None if no node has it."""
        return self._devices.get(uuid)


# Kinds of values: each raises ValueError with the end of a sentence that begins with the key.


def engine_address(value: object) -> str:
    """Return an engine's address, if it is safe from interception and intruders."""
    found = text(value)
    parts = urlsplit(found)
    if parts.scheme in ("tcp", "http"):
        raise ValueError(
            f"is {shown(found)}: anyone who can reach the port of an engine on plain TCP is root "
            "on the node. Use ssh://USER@NODE, or https://NODE:2376 with 'tls'."
        )
    if not _is_url(parts, "ssh", "https"):
        raise ValueError(
            f"is {shown(found)}. Write unix:///var/run/docker.sock, ssh://USER@NODE or "
            "https://NODE:2376."
        )
    return found.rstrip("/")


def sampler_address(value: object) -> str:
    """Return a sampler's address, if only the hub can reach it."""
    found = text(value)
    parts = urlsplit(found)
    if not _is_url(parts, "http", "https"):
        raise ValueError(f"is {shown(found)}. Write https://10.0.0.11:9401, or unix:///PATH.")
    if parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "::1", "localhost"):
        raise ValueError(
            f"is {shown(found)}: without TLS, anyone on the network could pose as the sampler. "
            "Write https://; http:// is only for 127.0.0.1, the hub's own machine."
        )
    return found.rstrip("/")


def _is_url(parts: SplitResult, *schemes: str) -> bool:
    """Return True for a plain address with one of the schemes, or a socket's path."""
    if parts.query or parts.fragment:
        return False
    if parts.scheme == "unix":
        return bool(re.fullmatch(_FILE, parts.path)) and not parts.netloc
    try:
        port, host, user = parts.port, parts.hostname, parts.username
    except ValueError:
        return False
    if parts.scheme not in schemes or parts.path not in ("", "/"):
        return False
    if parts.password is not None or (user is not None and parts.scheme != "ssh"):
        return False
    named = user is None or re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}", user)
    return bool(host and _is_address(host) and port != 0 and named)


def _address(value: object) -> str:
    found = text(value)
    if not _is_address(found):
        raise ValueError(f"is {shown(found)}, neither an IP address nor a host name.")
    return found


def _ip_address(value: object) -> str:
    found = text(value)
    try:
        return str(ipaddress.ip_address(found))
    except ValueError:
        raise ValueError(f"is {shown(found)}, not an IP address such as 10.0.0.11.") from None


def _is_address(word: str) -> bool:
    try:
        ipaddress.ip_address(word)
    except ValueError:
        return _HOST.fullmatch(word) is not None and ".." not in word
    return True


def _model(value: object) -> str:
    found = text(value)
    if not found.isprintable() or len(found) > 100:
        raise ValueError(f"is {shown(found)}, not a model name such as NVIDIA A100-SXM4-80GB.")
    return found


def _no_shards(value: object) -> int:
    if value != 0 or isinstance(value, bool):
        raise ValueError(
            f"is {shown(value)} for the whole cluster, where older versions gave members shares of "
            "GPUs and no whole ones. Write it as 'shards: {a100: 4}' in each node with GPUs to "
            "share, or run gpuspawner slurm config --shards 4 again. Members then get whole GPUs "
            "too, and shares where they, or 'sharing: slot' of the environment, ask for one."
        )
    return 0


# What the file may hold.


class DeviceEntry(ConfigModel):
    """A device of a node."""

    uuid: DeviceUUID
    """The device's UUID, as ``nvidia-smi -L`` shows it. Each device is listed once."""
    model: Annotated[str, Checked(_model)]
    """The model's name, such as NVIDIA A100-SXM4-80GB."""
    memory: DeviceMemory
    """The memory of the device."""
    file: FilePath = ""
    """The file by which Slurm identifies it. Without it: /dev/nvidia0 for the first, and so on."""
    gres: GresType = ""
    """Slurm's type of the model. Without it: made of the model's name, such as a100."""


class TLSEntry(ConfigModel):
    """Files, beside this one unless they have a whole path."""

    ca: Annotated[str, Checked(text)]
    """The certificate of the authority that signed the engine's and the hub's certificates."""
    certificate: Annotated[str, Checked(text)]
    """The hub's certificate."""
    key: Annotated[str, Checked(text)]
    """The hub's private key, which nobody else may read."""


class NodeEntry(ConfigModel):
    """A machine with a Docker Engine and devices."""

    engine: Annotated[str, Checked(engine_address)]
    """The Docker Engine: unix:///var/run/docker.sock, ssh://USER@NODE or https://NODE:2376."""
    tls: TLSEntry | None = None
    """Files for an engine or a sampler with an https:// address, which needs them."""
    sampler: Annotated[str, Checked(sampler_address)] = ""
    """The address of the node's ``gpuspawner slurm sampler``. Without it: GPUs are not measured."""
    address: Annotated[str, Checked(_ip_address)]
    """The IP address on which servers publish their ports, reachable for the hub."""
    cpus: Cpus
    """CPUs of the node."""
    memory: Size
    """Memory of the node."""
    layout: Annotated[str, LAYOUT] = ""
    """Sockets, cores and threads, as ``slurmd -C`` shows them. Without it: Slurm decides."""
    shards: dict[GresKey, Shards] = {}
    """How many servers may share a device, by Slurm's type: ``{a100: 4}``. Without it: no type of
    the node is shared. gres.conf must say the same."""
    devices: list[DeviceEntry] = []
    """The devices, in the order of gres.conf. Without it: the node has none."""

    @model_validator(mode="after")
    def _check_tls(self) -> NodeEntry:
        https = [key for key in ("engine", "sampler") if getattr(self, key)[:8] == "https://"]
        if "engine" in https and self.tls is None:
            raise mistake(
                "has an engine that needs 'tls' with 'ca', 'certificate' and 'key': anyone who can "
                "reach an engine that asks for no certificate is root on the node.",
                "engine",
            )
        if https and self.tls is None:
            raise mistake("has an https:// sampler, which also needs 'tls'.", "sampler")
        if self.tls is not None and not https:
            raise mistake("has 'tls' but no https:// address that uses it. Leave it out.", "tls")
        return self


class ClusterFile(ConfigModel):
    """The nodes that Slurm schedules."""

    name: ClusterName = "gpuspawner"
    """The cluster's name in slurm.conf (ClusterName)."""
    partition: Partition = "gpu"
    """The partition in which the hub submits jobs."""
    hub_address: Annotated[str, Checked(_address)] = ""
    """The hub's address for the nodes."""
    shards: Annotated[int, Checked(_no_shards, {"const": 0})] = 0
    """Of older versions, which shared all devices alike. Only 0 is valid: nodes have ``shards``."""
    slurm_conf: FilePath = ""
    """Path of slurm.conf. Without it: Slurm's default path."""
    nodes: Annotated[dict[NodeName, NodeEntry], Field(min_length=1)]
    """The nodes, by their short host names."""


# Reading.


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Return the cluster in a file. Raises ConfigError with the line and the remedy."""
    name = os.fspath(path)
    return cluster_of(read_text(name, MOST_BYTES, "list of nodes"), name, Path(name).parent)


def cluster_of(written: str, name: str = "cluster.yaml", folder: Path | None = None) -> Cluster:
    """Return the cluster in a text; ``folder`` is where its files of TLS are."""
    data, origin = read_yaml(written, name, folder)
    nouns = {"nodes": "node", "devices": "device"}
    read = read_model(ClusterFile, {} if data is None else data, origin, "the cluster", nouns)
    _check_devices(origin, read)
    _check_shards(origin, read)
    return Cluster(
        name=read.name,
        partition=read.partition,
        hub_address=read.hub_address,
        slurm_conf=read.slurm_conf,
        nodes=tuple(_node(origin, node, entry) for node, entry in read.nodes.items()),
    )


def _check_devices(origin: Origin, read: ClusterFile) -> None:
    seen: dict[str, str] = {}
    for name, node in read.nodes.items():
        for index, device in enumerate(node.devices):
            if device.uuid in seen:
                raise origin.error(
                    ("nodes", name, "devices", index, "uuid"),
                    f"the device {device.uuid} is already listed for the node {seen[device.uuid]}. "
                    "List each device once.",
                )
            seen[device.uuid] = name


def _check_shards(origin: Origin, read: ClusterFile) -> None:
    for name, node in read.nodes.items():
        types = {device.gres or gres_type(device.model) for device in node.devices}
        for unknown in sorted(node.shards.keys() - types):
            known = f"it has {' and '.join(sorted(types))}" if types else "it has none"
            raise origin.error(
                ("nodes", name, "shards", unknown),
                f"the node {name} has no device of the type {unknown!r} to share: {known}.",
            )


def _node(origin: Origin, name: str, entry: NodeEntry) -> Node:
    return Node(
        name=name,
        address=entry.address,
        engine=entry.engine,
        tls=None if entry.tls is None else _tls(origin, name, entry.tls),
        sampler=entry.sampler,
        cpus=entry.cpus,
        memory_bytes=entry.memory,
        layout=entry.layout,
        shards={name: count for name, count in entry.shards.items() if count > 1},
        devices=tuple(
            NodeDevice(
                uuid=device.uuid,
                model=device.model,
                memory_bytes=device.memory,
                file=device.file or f"/dev/nvidia{index}",
                gres=device.gres or gres_type(device.model),
            )
            for index, device in enumerate(entry.devices)
        ),
    )


def _tls(origin: Origin, node: str, entry: TLSEntry) -> TLS:
    found: dict[str, str] = {}
    for key, written in entry:
        path = found[key] = os.path.join(origin.folder or "", written)
        if fault := _fault_of(path, is_secret=key == "key"):
            what = f"'{key}' of 'tls' of node {node!r} is {path}, which {fault}"
            raise origin.error(("nodes", node, "tls", key), what)
    return TLS(**found)


def _fault_of(path: str, *, is_secret: bool) -> str:
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            with open(path, "rb"):
                pass
    except OSError as error:
        return f"cannot be read: {error.strerror}."
    if not stat.S_ISREG(mode):
        return "is not an ordinary file."
    if is_secret and mode & 0o077:
        return f"other users can read, which makes them root on the node: run chmod 600 {path}"
    return ""
