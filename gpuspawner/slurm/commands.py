"""The command ``gpuspawner slurm``: from machines with GPUs to a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import hashlib
import logging
import os
import re
import signal
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..cli.command import group
from ..cli.config import Settings
from ..cli.output import count, note, show
from ..cli.parameters import PATH, argument, flag, option
from ..core.config_files import read_text
from ..core.errors import ConfigError
from ..devices.discovery import open_source
from ..devices.source import SamplingSource
from . import cluster_commands
from .cluster import TLS, Cluster, Node, cluster_of, sampler_address
from .cluster_commands import (
    MOST_BYTES,
    HostInventory,
    fetched,
    read_inventory,
    this_host,
    with_gres_types,
)
from .config import (
    TESTED,
    SlurmOptions,
    cgroup_conf,
    cluster_yaml,
    gres_conf,
    is_tested,
    slurm_conf,
    slurmdbd_conf,
)
from .sampler import Recorder, serve
from .shards import parse_shards, with_shards

_HEADER = (
    "# Written by gpuspawner slurm config, which replaces it when it is run again. What somebody\n"
    "# edited by hand it replaces with --force only. {digest}\n"
)
_DIGEST = re.compile(r"\A#.*\n#.* ([0-9a-f]{64})\n")
PRIVATE = ("slurmdbd.conf",)
"""Files that nobody else may read: slurmdbd requires it."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A planned file, and the existing one."""

    path: Path
    text: str
    before: str | None
    """None if there is none."""

    @property
    def changed(self) -> bool:
        """True if the planned file differs from the existing one."""
        return self.text != self.before

    @property
    def edited(self) -> bool:
        """True if the existing file was changed since the command wrote it."""
        if self.before is None:
            return False
        found = _DIGEST.match(self.before)
        return found is None or _digest(_body(self.before)) != found[1]

    def difference(self) -> str:
        """Return what would change in the existing file, as ``diff -u`` shows it."""
        before, after = (_body(text or "").splitlines() for text in (self.before, self.text))
        name = str(self.path)
        return "\n".join(difflib.unified_diff(before, after, name, name, lineterm=""))


def drafts(folder: Path, bodies: Mapping[str, str]) -> list[PlannedFile]:
    """Return the planned files, with those in the folder. Raises ConfigError."""
    found = []
    for name, body in bodies.items():
        path = folder / name
        try:
            before = path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            before = None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
        # The header shows whether somebody edits the file.
        text = _HEADER.format(digest=_digest(body)) + "\n" + body
        found.append(PlannedFile(path, text, before))
    return found


def write(changed: Sequence[PlannedFile]) -> None:
    """Write the files, each completely or not at all. Raises ConfigError."""
    for draft in changed:
        folder = draft.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(dir=folder, prefix=f".{draft.path.name}.")
            try:
                with open(number, "w", encoding="utf-8") as file:
                    file.write(draft.text)
                    file.flush()
                    os.fsync(file.fileno())
                os.chmod(name, 0o600 if draft.path.name in PRIVATE else 0o644)
                os.replace(name, draft.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            raise ConfigError(
                f"{draft.path} cannot be written: {error.strerror}. Name another folder with --out."
            ) from None


def _body(text: str) -> str:
    found = _DIGEST.match(text)
    return text[found.end() + 1 :] if found else text


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


LOCAL_ENGINE = "unix:///var/run/docker.sock"
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}")
_SETTING = re.compile(r"[A-Za-z][A-Za-z0-9]{1,60}")


@group()
def slurm(settings: Settings) -> None:
    """Refuse: a subcommand is needed."""
    raise ConfigError(
        "Name a subcommand: gpuspawner slurm config HOST..., inventory, sampler, sync or audit."
    )


slurm.add_command(cluster_commands.print_inventory)


@slurm.command()
@argument(
    "hosts",
    "HOST[=FILE]...",
    "a machine with GPUs: queried by ssh, or read from FILE, which gpuspawner slurm inventory "
    "wrote there",
    nargs=-1,
    required=True,
)
@option("--out", "DIR", "folder for the files (default: ./slurm)", type=PATH, default="slurm")
@option(
    "--controller",
    "HOST[=ADDRESS]",
    "where slurmctld, its database and the hub run (default: this machine)",
    default="",
)
@option("--name", "NAME", "name of the cluster (default: gpuspawner)", default="gpuspawner")
@option("--partition", "NAME", "name of the partition of all nodes (default: gpu)", default="gpu")
@option(
    "--shards",
    "[[NODE/]MODEL=]N",
    "let N servers share each GPU, or each of a model such as A100=4, or of a node's model such as "
    "gpu1/A100=4; can be repeated (default: no sharing)",
    "shards",
    multiple=True,
)
@option(
    "--hours", "N", "longest time of a job, in hours (default: 168, a week)", type=int, default=168
)
@option(
    "--engine",
    "URL",
    "how the hub reaches a node's Docker Engine: ssh://USER@{host} or, with --tls, "
    "https://{host}:2376 (default: ssh://{host}, or the latter with --tls)",
    default="ssh://{host}",
)
@option("--tls", "DIR", "folder with ca.pem, cert.pem and key.pem for the engines", default="")
@option(
    "--sampler",
    "URL",
    "where gpuspawner slurm sampler listens on each node: https://{host}:9401, with --tls; on the "
    "hub's own machine it is http://127.0.0.1:9401 (default: no samplers)",
    default="",
)
@option(
    "--set",
    "NAME=VALUE",
    "add or override a setting of slurm.conf; can be repeated",
    "more",
    multiple=True,
)
@flag("--dry-run", "show what would change, and write nothing")
@flag("--force", "replace files even if they were edited by hand")
def config(
    settings: Settings,
    hosts: Sequence[str],
    out: Path,
    controller: str,
    name: str,
    partition: str,
    shards: Sequence[str],
    hours: int,
    engine: str,
    tls: str,
    sampler: str,
    more: Sequence[str],
    dry_run: bool,
    force: bool,
) -> int:
    """Write Slurm's configuration and cluster.yaml for these hosts."""
    head, address = _controller(controller)
    if not 1 <= hours <= 8760:
        raise ConfigError(f"--hours {hours}: write 1 to 8760.")
    rules = parse_shards(shards)
    options = SlurmOptions(controller=head, address=address, longest_hours=hours, more=_more(more))
    named = [_named(word) for word in hosts]
    nodes = _nodes(settings, options, named, NodeAddresses(engine, tls, sampler))
    made = Cluster(
        name=name,
        partition=partition,
        hub_address=options.address or options.controller,
        nodes=with_shards(with_gres_types(nodes), rules),
    )
    # What is invalid in cluster.yaml is refused here, in the same words.
    cluster = cluster_of(cluster_yaml(made), "cluster.yaml (not written)")
    bodies = {
        "slurm.conf": slurm_conf(cluster, options),
        "gres.conf": gres_conf(cluster),
        "cgroup.conf": cgroup_conf(),
        "slurmdbd.conf": slurmdbd_conf(options),
        "cluster.yaml": cluster_yaml(cluster),
    }
    found = drafts(out, bodies)
    changed = [draft for draft in found if draft.changed]
    lost = [draft for draft in changed if draft.edited and not force]
    written = [] if lost or dry_run else changed
    write(written)
    _show_drafts(cluster, changed, lost, written)
    return 1 if lost else 0


def _show_drafts(
    cluster: Cluster,
    changed: Sequence[PlannedFile],
    lost: Sequence[PlannedFile],
    written: Sequence[PlannedFile],
) -> None:
    paths, edited = [str(draft.path) for draft in changed], [str(draft.path) for draft in lost]
    names = [node.name for node in cluster.nodes]
    plain = {"written": bool(written), "changed": paths, "edited": edited, "nodes": names}
    devices = sum(len(node.devices) for node in cluster.nodes)
    lines = [draft.difference() for draft in changed if draft.before is not None]
    lines.append(f"{count(len(names), 'node')}, {count(devices, 'device')}.")
    if not changed:
        lines[-1] += " Nothing to do."
    elif written:
        lines[-1] += f" Written: {', '.join(paths)}."
    show(plain, "\n".join(lines))
    if lost:
        note(
            f"gpuspawner: Nothing was written: {', '.join(edited)} was edited by hand. Use --set "
            "or another option instead of the edit, or replace the file with --force."
        )


# The cluster from the command line and the inventories.


@dataclass(frozen=True, slots=True)
class NodeAddresses:
    """How the hub reaches the nodes, with ``{host}`` for the name of each."""

    engine: str
    tls: str
    """The folder of certificates for the engines; empty without TLS."""
    sampler: str

    def engine_of(
        self, options: SlurmOptions, host: str, found: HostInventory
    ) -> tuple[str, TLS | None]:
        """Return where a node's Docker Engine is, and the certificates for it."""
        if found.hostname == options.controller:
            return LOCAL_ENGINE, None
        if not self.tls:
            return self.engine.replace("{host}", host), None
        folder = Path(self.tls).resolve()
        names = (str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem"))
        usual = self.engine == "ssh://{host}"
        engine = "https://{host}:2376" if usual else self.engine
        return engine.replace("{host}", host), TLS(*names)

    def sampler_of(self, engine: str, host: str) -> str:
        """Return where a node's sampler answers; empty without samplers."""
        if self.sampler and engine == LOCAL_ENGINE:
            return f"http://127.0.0.1:{self.sampler.rstrip('/').rpartition(':')[2]}"
        return self.sampler.replace("{host}", host)


def _nodes(
    settings: Settings,
    options: SlurmOptions,
    named: Sequence[tuple[str, str]],
    addresses: NodeAddresses,
) -> list[Node]:
    nodes: dict[str, Node] = {}
    for host, file in named:
        found = _inventory(host, file, settings)
        if found.hostname in nodes:
            raise ConfigError(
                f"Two hosts are called {found.hostname}: give one of them another name "
                "(hostnamectl set-hostname)."
            )
        _check_versions(host, found)
        engine, tls = addresses.engine_of(options, host, found)
        nodes[found.hostname] = Node(
            name=found.hostname,
            address=_address(host, found, options),
            engine=engine,
            tls=tls,
            sampler=addresses.sampler_of(engine, host),
            devices=found.devices,
            cpus=found.cpus,
            memory_bytes=found.memory_bytes,
            layout=found.layout,
        )
    return list(nodes.values())


def _inventory(host: str, file: str, settings: Settings) -> HostInventory:
    if file:
        return read_inventory(read_text(file, MOST_BYTES, "inventory"), file)
    here = socket.gethostname()
    if host in ("localhost", here, here.partition(".")[0]):
        return this_host(settings)
    return read_inventory(fetched(host), f"what {host} printed")


def _check_versions(host: str, found: HostInventory) -> None:
    if not found.slurm:
        note(f"{host} has no slurmd yet: install slurmd and slurm-client there.")
    elif not is_tested(found.slurm):
        raise ConfigError(
            f"{host} has Slurm {found.slurm}, which gpuspawner is not tested with. Install "
            f"{' or '.join(TESTED)} (Debian 12 has it)."
        )
    if not found.engine:
        note(f"No Docker Engine answered on {host}: start it there.")


def _address(host: str, found: HostInventory, options: SlurmOptions) -> str:
    own = found.hostname == options.controller
    name = options.address if own and options.address else host
    try:
        told = str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
    except OSError:
        raise ConfigError(
            f"The address of {name} cannot be found. Give the address instead of the name."
        ) from None
    if told.startswith("127."):
        more = f"--controller {found.hostname}=ADDRESS" if own else "its address instead"
        raise ConfigError(f"{name} is {told} here, which no other machine can reach. Give {more}.")
    return told


# The command's arguments.


def _named(word: str) -> tuple[str, str]:
    host, equals, file = word.partition("=")
    if not _HOST.fullmatch(host) or (equals and not file):
        raise ConfigError(f"{word!r} is not a host: write its name or address, or HOST=FILE.")
    return host, file


def _controller(word: str) -> tuple[str, str]:
    host, _, address = word.partition("=")
    host = host or socket.gethostname().partition(".")[0]
    if not _HOST.fullmatch(host) or (address and not _HOST.fullmatch(address)):
        raise ConfigError(f"{word!r} is not a host: write --controller NAME or NAME=ADDRESS.")
    return host, address


def _more(words: Sequence[str]) -> dict[str, str]:
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        if not _SETTING.fullmatch(name) or not value or not value.isprintable() or "#" in value:
            raise ConfigError(f"--set {word!r}: write NAME=VALUE as slurm.conf has it.")
        found[name] = value
    return found


slurm.add_command(cluster_commands.sync)
slurm.add_command(cluster_commands.audit)

LEAST_SECONDS = 30.0
"""Minimum seconds between two process lists, the driver's slowest query."""


@slurm.command()
@option(
    "--listen",
    "URL",
    "where to listen: https://ADDRESS:9401, http://127.0.0.1:9401 or unix:///PATH, the same as "
    "'sampler' of this node in cluster.yaml",
    required=True,
)
@option(
    "--tls",
    "DIR",
    "folder with ca.pem, server-cert.pem and server-key.pem, for https (default: /etc/docker/tls)",
    type=PATH,
    default="/etc/docker/tls",
)
@option(
    "--processes",
    "SECONDS",
    "seconds between two lists of the processes on a GPU (default: 60; at least 30)",
    "processes_seconds",
    type=float,
    default=60.0,
)
def sampler(settings: Settings, listen: str, tls: Path, processes_seconds: float) -> None:
    """Serve this node's GPU measurements to the hub until stopped."""
    try:
        url = sampler_address(listen)
    except ValueError as error:
        raise ConfigError(f"--listen {error}") from None
    if not LEAST_SECONDS <= processes_seconds <= 86_400:
        raise ConfigError(f"--processes {processes_seconds:g}: write {LEAST_SECONDS:.0f} to 86400.")
    source = open_source(settings.services.devices.source)
    if not isinstance(source, SamplingSource):
        raise ConfigError(f"The source {source.name} does not report the use of its devices.")
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
    recorder = Recorder(source.sampler(processes_seconds))
    asyncio.run(_until_ended(recorder, url, tls))


async def _until_ended(recorder: Recorder, url: str, tls: Path) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(recorder, url, tls, stop)
