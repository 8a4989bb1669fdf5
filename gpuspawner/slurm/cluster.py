"""The cluster file: nodes, their engines, and what Slurm calls their GPUs."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..core.config_files import (
    Section,
    device_memory,
    read_text,
    read_yaml,
    shown,
    size,
    text,
    whole,
)
from ..core.errors import ConfigError

GRES_TYPE = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,62})")
"""What Slurm takes as the type of a device."""

_MAKERS_WORDS = frozenset(
    ("nvidia", "tesla", "geforce", "quadro", "graphics", "device", "generation")
)


def gres_type(model: str) -> str:
    """Slurm's word for a model: ``a100`` for ``NVIDIA A100-SXM4-80GB``, ``rtx-4090``."""
    kept: list[str] = []
    for word in _words(model):
        kept.append(word)
        if any(character.isdigit() for character in word):
            break
    return "-".join(kept)[:63] or "gpu"


def gres_types(models: Iterable[str]) -> dict[str, str]:
    """Slurm's word for each model, no two the same. Models that would share one get their whole
    names."""
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
"""The largest file that is read."""
MOST_SHARDS = 64
"""Shares of one device."""

NODE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
CLUSTER_NAME = re.compile(r"[a-z][a-z0-9_]{0,38}")
_PARTITION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}")
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{3,94}")
_FILE = re.compile(r"(?:/[A-Za-z0-9._-]+)+")
_LAYOUT = re.compile(
    r"(?:(?:Boards|SocketsPerBoard|CoresPerSocket|ThreadsPerCore)=[1-9][0-9]{0,3}(?: |$))+"
)


@dataclass(frozen=True, slots=True)
class TLS:
    """The files with which the hub and a node's engine prove to each other who they are."""

    ca: str
    certificate: str
    key: str


@dataclass(frozen=True, slots=True)
class NodeDevice:
    """A device of a node, as Slurm and as the engine name it."""

    uuid: str
    model: str
    memory_bytes: int
    file: str = "/dev/nvidia0"
    """By which Slurm knows it; it gives no access here."""
    gres: str = ""
    """Slurm's word for the model, as in ``--gres=gpu:a100:1``."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine with a Docker Engine and devices."""

    name: str
    address: str
    """The IP address on which containers publish their ports, where the hub reaches it."""
    engine: str
    """``unix://``, ``ssh://`` or ``https://``."""
    tls: TLS | None = None
    sampler: str = ""
    """Where ``gpuspawner slurm sampler`` tells what its devices do; empty where none runs."""
    devices: tuple[NodeDevice, ...] = ()
    """In the order of Slurm's indices."""
    cpus: int = 1
    memory_bytes: int = 0
    layout: str = ""
    """Sockets, cores and threads in slurm.conf's words; empty leaves them to Slurm."""

    def device_at(self, index: int) -> NodeDevice:
        """The device that Slurm counts by ``index``, from 0. Raises ConfigError."""
        if not 0 <= index < len(self.devices):
            raise ConfigError(
                f"Slurm gave the device {index} of the node {self.name}, and cluster.yaml knows "
                f"{len(self.devices)} there. Run gpuspawner slurm config again."
            )
        return self.devices[index]

    def client_settings(self) -> dict[str, Any]:
        """What ``docker.APIClient`` takes to reach this node's engine, and no other."""
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
    """Where the nodes reach the hub."""
    shards: int = 0
    """Shares of each device that members can ask for; 0 when devices are not shared."""
    slurm_conf: str = ""
    """Path of slurm.conf; empty for Slurm's own default place."""

    @cached_property
    def _nodes(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def _devices(self) -> dict[str, tuple[Node, NodeDevice]]:
        return {device.uuid: (node, device) for node in self.nodes for device in node.devices}

    def node(self, name: str) -> Node:
        """The node of this name. Raises ConfigError for one that the file does not know."""
        if (found := self._nodes.get(name)) is None:
            raise ConfigError(
                f"Slurm names the node {name}, which cluster.yaml does not know. Add it: "
                "gpuspawner slurm config."
            )
        return found

    def device(self, uuid: str) -> tuple[Node, NodeDevice] | None:
        """The device of this UUID and its node; None when no node has it."""
        return self._devices.get(uuid)

    def types_of(self, model: str) -> tuple[str, ...]:
        """Slurm's words for the models whose name has ``model`` in it, compared without case."""
        wanted = model.lower()
        found = (d.gres for _, d in self._devices.values() if wanted in d.model.lower())
        return tuple(dict.fromkeys(found))


# Reading.


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """The cluster in the file at ``path``. Raises ConfigError naming the line and the remedy."""
    name = os.fspath(path)
    return cluster_of(read_text(name, MOST_BYTES, "list of nodes"), name, Path(name).parent)


def cluster_of(written: str, name: str = "cluster.yaml", folder: Path | None = None) -> Cluster:
    """The cluster in a text. Files of TLS are looked for beside it, in ``folder``."""
    data, origin = read_yaml(written, name, folder)
    top = Section({} if data is None else data, origin, (), "the cluster")
    cluster = Cluster(
        name=top.take("name", _matching(CLUSTER_NAME, "small letters, digits and _"), "gpuspawner"),
        partition=top.take("partition", _matching(_PARTITION, "letters, digits, _ and -"), "gpu"),
        hub_address=top.take("hub_address", address, ""),
        shards=top.take("shards", _shards, 0),
        slurm_conf=top.take("slurm_conf", _path, ""),
        nodes=tuple(_node(node, section) for node, section in top.sections("nodes", "node")),
    )
    top.done()
    if not cluster.nodes:
        raise top.error("nodes", "The cluster has no nodes. Write one below 'nodes'.")
    seen: dict[str, str] = {}
    for node in cluster.nodes:
        for index, device in enumerate(node.devices):
            if device.uuid in seen:
                raise origin.error(
                    ("nodes", node.name, "devices", index, "uuid"),
                    f"the device {device.uuid} is on the node {seen[device.uuid]} already. A "
                    "device is on one node.",
                )
            seen[device.uuid] = node.name
    return cluster


def _node(name: str, section: Section) -> Node:
    if not NODE_NAME.fullmatch(name):
        raise section.error(
            "", f"the node's name {shown(name)} is not right. Use letters, digits and -."
        )
    engine = section.take("engine", engine_address)
    tls = section.take("tls", lambda value: value, None)
    sampler = section.take("sampler", sampler_address, "")
    secure = [url for url in (engine, sampler) if url.startswith("https://")]
    node = Node(
        name=name,
        address=section.take("address", ip_address),
        engine=engine,
        tls=None if tls is None else _tls(section, tls),
        sampler=sampler,
        cpus=section.take("cpus", _count),
        memory_bytes=section.take("memory", size),
        layout=section.take("layout", layout, ""),
        devices=tuple(_devices(section)),
    )
    section.done()
    if engine.startswith("https://") and tls is None:
        raise section.error(
            "engine",
            f"the engine of {section.label} needs 'tls' with 'ca', 'certificate' and 'key': who "
            "reaches an engine that asks for no certificate is root on the node.",
        )
    if secure and tls is None:
        raise section.error("sampler", f"the https:// sampler of {section.label} needs 'tls', too.")
    if tls is not None and not secure:
        raise section.error("tls", f"'tls' of {section.label} belongs to an https:// engine.")
    return node


def _devices(section: Section) -> Iterable[NodeDevice]:
    listed: list[Any] = section.take("devices", _listed, [])
    for index, data in enumerate(listed):
        path = (*section.path, "devices", index)
        inner = Section(data, section.origin, path, f"device {index} of {section.label}")
        model = inner.take("model", _model)
        yield NodeDevice(
            uuid=inner.take("uuid", _matching(_UUID, "letters, digits and -, such as GPU-...")),
            model=model,
            memory_bytes=inner.take("memory", device_memory),
            file=inner.take("file", _path, f"/dev/nvidia{index}"),
            gres=inner.take("gres", _matching(GRES_TYPE, "small letters, digits, _ and -"), "")
            or gres_type(model),
        )
        inner.done()


def _tls(section: Section, data: object) -> TLS:
    inner = Section(data, section.origin, (*section.path, "tls"), f"'tls' of {section.label}")
    found = {key: _tls_file(inner, key) for key in ("ca", "certificate", "key")}
    inner.done()
    return TLS(**found)


def _tls_file(section: Section, key: str) -> str:
    path = section.take(key, text)
    if section.origin.folder is not None:
        path = os.path.join(section.origin.folder, path)
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            with open(path, "rb"):
                pass
    except OSError as error:
        raise section.error(
            key, f"'{key}' of {section.label}: {path} cannot be read: {error.strerror}."
        ) from None
    if not stat.S_ISREG(mode):
        raise section.error(key, f"'{key}' of {section.label}: {path} is no ordinary file.")
    if key == "key" and mode & 0o077:
        raise section.error(
            key,
            f"Others can read the key {path}, and with it be root on the node: chmod 600 {path}",
        )
    return path


# Kinds of values, for Section.take: each raises ValueError with the end of a sentence.


def engine_address(value: object) -> str:
    """Where an engine is, if nobody else can come between or in."""
    found = text(value)
    parts = urlsplit(found)
    if parts.scheme in ("tcp", "http"):
        raise ValueError(
            f"is {shown(found)}: an engine on plain TCP makes everybody root who reaches its port. "
            "Use ssh://USER@NODE, or https://NODE:2376 with 'tls'."
        )
    good = (
        bool(_FILE.fullmatch(parts.path)) and not parts.netloc
        if parts.scheme == "unix"
        else parts.scheme in ("ssh", "https") and parts.path in ("", "/") and _is_netloc(parts)
    )
    if not good or parts.query or parts.fragment:
        raise ValueError(
            f"is {shown(found)}. Write unix:///var/run/docker.sock, ssh://USER@NODE or "
            "https://NODE:2376."
        )
    return found.rstrip("/")


def sampler_address(value: object) -> str:
    """Where a sampler is, if only the hub reaches it."""
    found = text(value)
    parts = urlsplit(found)
    good = (
        bool(_FILE.fullmatch(parts.path)) and not parts.netloc
        if parts.scheme == "unix"
        else parts.scheme in ("http", "https") and parts.path in ("", "/") and _is_netloc(parts)
    )
    if not good or parts.query or parts.fragment:
        raise ValueError(f"is {shown(found)}. Write https://10.0.0.11:9401, or unix:///PATH.")
    if parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "::1", "localhost"):
        raise ValueError(
            f"is {shown(found)}: without TLS everybody on the network could answer in its place. "
            "Write https://; http:// is for 127.0.0.1, on the hub's own machine."
        )
    return found.rstrip("/")


def _is_netloc(parts: Any) -> bool:
    try:
        port, host, user = parts.port, parts.hostname, parts.username
    except ValueError:
        return False
    if parts.password is not None or (user is not None and parts.scheme != "ssh"):
        return False
    named = user is None or re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}", user)
    return bool(host and _is_address(host) and port != 0 and named)


def address(value: object) -> str:
    """An IP address, or a host's name."""
    found = text(value)
    if not _is_address(found):
        raise ValueError(f"is {shown(found)}, neither an IP address nor a host's name.")
    return found


def ip_address(value: object) -> str:
    """An IP address: containers publish their ports on it."""
    found = text(value)
    try:
        return str(ipaddress.ip_address(found))
    except ValueError:
        raise ValueError(f"is {shown(found)}, no IP address such as 10.0.0.11.") from None


def _is_address(word: str) -> bool:
    try:
        ipaddress.ip_address(word)
    except ValueError:
        return _HOST.fullmatch(word) is not None and ".." not in word
    return True


def layout(value: object) -> str:
    """What ``slurmd -C`` says of sockets, cores and threads."""
    found = text(value)
    if not _LAYOUT.fullmatch(found):
        raise ValueError(
            f"is {shown(found)}. Write it as slurmd -C does, such as 'SocketsPerBoard=1 "
            "CoresPerSocket=8 ThreadsPerCore=2'."
        )
    return found


def _matching(pattern: re.Pattern[str], words: str) -> Any:
    def kind(value: object) -> str:
        found = text(value)
        if not pattern.fullmatch(found):
            raise ValueError(f"is {shown(found)}. Use {words}.")
        return found

    return kind


def _path(value: object) -> str:
    found = text(value)
    if not _FILE.fullmatch(found) or ".." in found.split("/"):
        raise ValueError(
            f"is {shown(found)}. Write a whole path of letters, digits, '.', '_' and '-'."
        )
    return found


def _model(value: object) -> str:
    found = text(value)
    if not found.isprintable() or len(found) > 100:
        raise ValueError(f"is {shown(found)}, not a model's name such as NVIDIA A100-SXM4-80GB.")
    return found


def _shards(value: object) -> int:
    if (found := whole(value)) > MOST_SHARDS:
        raise ValueError(f"is {found}; {MOST_SHARDS} is the most. Write less.")
    return found


def _count(value: object) -> int:
    if (found := whole(value)) < 1:
        raise ValueError("is 0. Write 1 or more.")
    return found


def _listed(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"is {shown(value)}, not a list. Begin each device with '- '.")
    return value
