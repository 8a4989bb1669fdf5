"""A node of the tests' cluster: a network, a name, a Docker Engine and devices of its own."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.tls

from tests.support import images, processes
from tests.support.engine import PrivateEngine
from tests.support.processes import as_root, signal_pid
from tests.support.slurm_daemons import on_machine
from tests.support.slurm_files import CGROUPS, Machine

TLS_PORT = 2376


@dataclass(frozen=True)
class NodeDevice:
    """One GPU of a node; its place in the node's list is Slurm's index."""

    uuid: str
    model: str
    memory_bytes: int
    file: Path


class Network:
    """A machine's own network, joined to this one by a link that can be cut."""

    def __init__(self, name: str, link: str, bridge: str, address: str) -> None:
        self.name = name
        self.link = link
        self.bridge = bridge
        self.address = address

    @property
    def path(self) -> Path:
        return Path("/run/netns", self.name)

    def make(self, containers: str, gateway: str) -> None:
        """Join it to the bridge, and say how its containers are reached.

        There is no way out of it but to this machine: no program in it waits for the internet.
        """
        inside = ["-n", self.name]
        ip("netns", "add", self.name)
        ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("link", "set", self.link, "master", self.bridge, "up")
        ip(*inside, "link", "set", "lo", "up")
        ip(*inside, "addr", "add", f"{self.address}/24", "dev", "eth0")
        ip(*inside, "link", "set", "eth0", "up")
        processes.run(as_root(self.around(["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])))
        ip("route", "replace", containers, "via", self.address, "src", gateway)

    def around(self, command: list[str]) -> list[str]:
        """The command in this network; it keeps its sight of the control groups."""
        return ["nsenter", f"--net={self.path}", "--", *command]

    def remove(self) -> None:
        """End all that runs in it, and take it away."""
        if not self.path.exists():
            return
        found = subprocess.run(
            as_root(["ip", "netns", "pids", self.name]), capture_output=True, text=True, check=False
        )
        for pid in found.stdout.split():
            signal_pid(int(pid), signal.SIGKILL)
        ip("link", "del", self.link, check=False)
        ip("netns", "del", self.name, check=False)


class _Client(docker.APIClient):
    """Certificates and proxies that the environment names are for the internet."""

    trust_env = property(lambda self: False, lambda self, value: None)


class NodeEngine(PrivateEngine):
    """A Docker Engine in a node's network: on a unix socket, and over TLS on its address."""

    def __init__(
        self,
        machine: Machine,
        devices: Sequence[NodeDevice],
        network: Network,
        folder: Path,
        place: int,
        gateway: str,
        tls: Path,
    ) -> None:
        """``place``: the node's number among all of this machine's clusters."""
        super().__init__()
        self.machine = machine
        self.devices = tuple(devices)
        self.network = network
        self.tls = tls
        self.slot = place
        self._gateway = gateway
        self._folder = folder

    @property
    def address(self) -> str:
        """Where the engine answers over TLS."""
        return f"https://{self.network.address}:{TLS_PORT}"

    @property
    def gateway(self) -> str:
        """The hub's machine as the containers see it."""
        return self._gateway

    @property
    def bridge(self) -> str:
        """Not Docker's own name for it: Docker gives such a bridge another address."""
        return "gpsp"

    @property
    def containers(self) -> str:
        """The network of the containers."""
        return f"10.232.{self.slot}.0/24"

    @property
    def data(self) -> Path:
        return processes.kept_dir() / "docker" / f"node-{self.slot}"

    def start(self) -> None:
        """Also with the devices of this node."""
        super().start()
        self.set_devices([d.uuid for d in self.devices], self.devices[0].model)

    def connect(self, timeout: float = 60) -> docker.APIClient:
        """A client over the network, as a hub on another machine has it."""
        pair = (str(self.tls / "cert.pem"), str(self.tls / "key.pem"))
        tls = docker.tls.TLSConfig(client_cert=pair, ca_cert=str(self.tls / "ca.pem"), verify=True)
        return _Client(base_url=self.address, tls=tls, version="auto", timeout=timeout)

    def _take_slot(self) -> None:
        self.directory = self._folder
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.directory / "lock", "a")  # noqa: SIM115 - held until stop()
        self.name = f"engine of {self.machine.name}"

    def _around(self, command: list[str]) -> list[str]:
        return self.network.around(on_machine(self.machine.name, command))

    def _make_bridge(self) -> None:
        inside = ["-n", self.network.name]
        if self.bridge in processes.run(as_root(["ip", *inside, "link"])):
            return
        ip(*inside, "link", "add", self.bridge, "type", "bridge")
        ip(*inside, "addr", "add", self.containers.replace(".0/", ".1/"), "dev", self.bridge)
        ip(*inside, "link", "set", self.bridge, "up")

    def _remove_bridge(self) -> None:
        """It goes with the network."""

    def _dockerd(self) -> list[str]:
        own = {
            "--host": f"tcp://{self.network.address}:{TLS_PORT}",
            "--tlscacert": self.tls / "ca.pem",
            "--tlscert": self.tls / "server-cert.pem",
            "--tlskey": self.tls / "server-key.pem",
            "--cgroup-parent": f"/{self.machine.name}",
            # A registry of a test is on this machine, which is another one for a node.
            "--insecure-registry": "10.233.0.0/16",
            # An engine's networks are its node's: all nodes can have the same.
            "--default-address-pool": "base=10.234.0.0/16,size=26",
        }
        usual = super()._dockerd()
        pool = usual.index("--default-address-pool")
        usual = usual[:pool] + usual[pool + 2 :]
        return [*usual, "--tlsverify", *(str(word) for pair in own.items() for word in pair)]


@dataclass(frozen=True)
class Node:
    """What tests see of a node."""

    name: str
    address: str
    engine: NodeEngine
    machine: Machine

    @property
    def devices(self) -> tuple[NodeDevice, ...]:
        """In the order of Slurm's indices."""
        return self.engine.devices

    def contain(self, labels: Mapping[str, str], **host: Any) -> str:
        """Start a container over TLS: its id."""
        with self.engine.connect() as client:
            config = client.create_host_config(**host)
            made = client.create_container(images.SILENT, labels=labels, host_config=config)
            client.start(made["Id"])
        return str(made["Id"])

    def containers(self) -> list[str]:
        """The running containers, by their ids."""
        return [found["Id"] for found in self.engine.client.containers()]

    @property
    def url(self) -> str:
        """Its engine over TLS, with the files in :attr:`tls`."""
        return self.engine.address

    @property
    def socket(self) -> str:
        """Its engine as programs on the node reach it. A cut link does not cut this."""
        return self.engine.url

    @property
    def tls(self) -> Path:
        """The folder of ``ca.pem``, ``cert.pem`` and ``key.pem``."""
        return self.engine.tls


def remove_groups(node: str) -> None:
    """End what is left in a node's control groups, and remove them."""
    roots = [CGROUPS, *(g for g in CGROUPS.iterdir() if g.is_dir() and not g.is_symlink())]
    for top in (root / name for root in roots for name in (f"slurm_{node}", node)):
        if not top.is_dir():
            continue
        for procs in top.rglob("cgroup.procs"):
            for pid in _lines(procs):
                signal_pid(int(pid), signal.SIGKILL)
        # From the leaves up; one that has just ended may take a moment.
        found = [str(p) for p in (top, *top.rglob("*")) if p.is_dir()]
        for path in sorted(found, reverse=True):
            subprocess.run(as_root(["rmdir", path]), capture_output=True, check=False)


def ip(*words: str, check: bool = True) -> None:
    """``ip WORDS``, as root."""
    if check:
        processes.run(as_root(["ip", *words]))
    else:
        subprocess.run(as_root(["ip", *words]), capture_output=True, check=False)


def share_images(
    source: PrivateEngine, tags: Iterable[str], engines: Iterable[PrivateEngine]
) -> None:
    """Give the engines what the source has, side by side, unless they have the very same."""
    for tag in tags:
        wanted = source.client.inspect_image(tag)["Id"]
        missing = [e for e in engines if wanted not in e.client.images(tag, quiet=True)]
        if not missing:
            continue
        kept = images._kept(tag, images._content(source, tag))
        copy = kept if kept.exists() else source.directory / "shared.tar"
        if copy != kept:
            with open(copy, "wb") as tar:
                tar.writelines(source.client.get_image(tag))
        with ThreadPoolExecutor() as pool:
            list(pool.map(_load, missing, [copy] * len(missing)))
        if copy != kept:
            copy.unlink()


def _load(engine: PrivateEngine, copy: Path) -> None:
    with open(copy, "rb") as tar:
        engine.client.load_image(tar)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []  # gone meanwhile
