"""``gpuspawner slurm``: from machines with GPUs to a cluster that Slurm schedules."""

from __future__ import annotations

import argparse
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..reading.files import read_text
from ..slurm.cluster import TLS, Cluster, Node, cluster_of
from ..slurm.config import (
    TESTED,
    SlurmOptions,
    cgroup_conf,
    cluster_yaml,
    gres_conf,
    is_tested,
    slurm_conf,
    slurmdbd_conf,
)
from ..slurm.inventory import MOST_BYTES, HostInventory, read_inventory, with_gres_types
from . import slurm_files, slurm_sampler, slurm_sync
from .config import Settings
from .grammar import changes_of
from .output import count, note, show
from .slurm_inventory import fetched, inventory, this_host

LOCAL_ENGINE = "unix:///var/run/docker.sock"
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}")
_SETTING = re.compile(r"[A-Za-z][A-Za-z0-9]{1,60}")


def grammar(command: argparse.ArgumentParser, common: Callable[..., Any]) -> None:
    """``gpuspawner slurm`` does nothing without a word after it."""
    add = changes_of(command, common)
    add("inventory", inventory, "Print what this machine would bring into a cluster, as JSON.")
    making = add("config", config, "Write Slurm's configuration for these hosts, and cluster.yaml.")
    making.add_argument(
        "hosts",
        nargs="+",
        metavar="HOST[=FILE]",
        help="a machine with GPUs, asked by ssh; or FILE, which gpuspawner slurm inventory wrote "
        "there",
    )
    making.add_argument("--out", default="slurm", metavar="DIR", help="where to (./slurm)")
    making.add_argument(
        "--controller",
        default="",
        metavar="HOST[=ADDRESS]",
        help="where slurmctld, its database and the hub run (default: this machine)",
    )
    making.add_argument("--name", default="gpuspawner", metavar="NAME", help="of the cluster")
    making.add_argument("--partition", default="gpu", metavar="NAME", help="of all nodes (gpu)")
    making.add_argument(
        "--shards", type=int, default=0, metavar="N", help="parts of each device to share (0: none)"
    )
    making.add_argument(
        "--hours", type=int, default=168, metavar="N", help="the longest job (168: a week)"
    )
    making.add_argument(
        "--engine",
        default="ssh://{host}",
        metavar="URL",
        help="how the hub reaches a node's Docker Engine: ssh://USER@{host} or, with --tls, "
        "https://{host}:2376",
    )
    making.add_argument(
        "--tls", default="", metavar="DIR", help="of ca.pem, cert.pem and key.pem for the engines"
    )
    making.add_argument(
        "--sampler",
        default="",
        metavar="URL",
        help="where gpuspawner slurm sampler tells on each node what its GPUs do: "
        "https://{host}:9401, with --tls; on the hub's own machine it is http://127.0.0.1:9401",
    )
    making.add_argument(
        "--set",
        action="append",
        default=[],
        dest="more",
        metavar="NAME=VALUE",
        help="another setting of slurm.conf, or another value; may be given again",
    )
    making.add_argument("--dry-run", action="store_true", help="show what would change")
    making.add_argument("--force", action="store_true", help="replace files that were edited")
    slurm_sync.grammar(add)
    slurm_sampler.grammar(add)


def slurm(arguments: argparse.Namespace, settings: Settings) -> int:
    """Nothing: say what can be said."""
    raise ConfigError(
        "Say what: gpuspawner slurm config HOST..., inventory, sampler, sync or audit."
    )


def config(arguments: argparse.Namespace, settings: Settings) -> int:
    """Write the files; 1, and nothing written, when that would lose an edit."""
    controller, address = _controller(arguments.controller)
    options = SlurmOptions(
        controller=controller,
        address=address,
        longest_hours=_hours(arguments.hours),
        more=_more(arguments.more),
    )
    named = [_named(word) for word in arguments.hosts]
    cluster = _cluster(arguments, settings, options, named)
    bodies = {
        "slurm.conf": slurm_conf(cluster, options),
        "gres.conf": gres_conf(cluster),
        "cgroup.conf": cgroup_conf(),
        "slurmdbd.conf": slurmdbd_conf(options),
        "cluster.yaml": cluster_yaml(cluster),
    }
    found = slurm_files.drafts(Path(arguments.out), bodies)
    changed = [draft for draft in found if draft.changed]
    lost = [draft for draft in changed if draft.edited and not arguments.force]
    if not lost and not arguments.dry_run:
        slurm_files.write(changed)
    _tell(arguments, cluster, found, lost)
    return 1 if lost else 0


def _tell(
    arguments: argparse.Namespace,
    cluster: Cluster,
    found: Sequence[slurm_files.Draft],
    lost: Sequence[slurm_files.Draft],
) -> None:
    changed = [draft for draft in found if draft.changed]
    written = bool(changed) and not lost and not arguments.dry_run
    plain = {
        "written": written,
        "changed": [str(draft.path) for draft in changed],
        "edited": [str(draft.path) for draft in lost],
        "nodes": [node.name for node in cluster.nodes],
    }
    devices = sum(len(node.devices) for node in cluster.nodes)
    lines = [draft.difference() for draft in changed if draft.before is not None]
    lines.append(f"{count(len(cluster.nodes), 'node')}, {count(devices, 'device')}.")
    if not changed:
        lines[-1] += " Nothing to do."
    elif written:
        lines[-1] += f" Written: {', '.join(str(draft.path) for draft in changed)}."
    show(arguments.json, plain, "\n".join(lines))
    if lost:
        names = ", ".join(str(draft.path) for draft in lost)
        note(
            f"gpuspawner: Nothing was written: {names} was edited by hand. Give --set or another "
            "option in place of the edit, or replace it with --force."
        )


# The cluster that the words and the inventories make.


def _cluster(
    arguments: argparse.Namespace,
    settings: Settings,
    options: SlurmOptions,
    named: Sequence[tuple[str, str]],
) -> Cluster:
    nodes: dict[str, Node] = {}
    for host, file in named:
        found = _inventory(host, file, settings)
        if found.hostname in nodes:
            raise ConfigError(
                f"Two hosts are called {found.hostname}: give each a name of its own (hostnamectl "
                "set-hostname)."
            )
        _check_versions(host, found)
        engine, tls = _engine(arguments, options, host, found)
        node = found.node(_address(host, found, options), engine, tls)
        nodes[found.hostname] = replace(node, sampler=_sampler(arguments.sampler, node, host))
    made = Cluster(
        name=arguments.name,
        partition=arguments.partition,
        hub_address=options.address or options.controller,
        shards=arguments.shards,
        nodes=with_gres_types(list(nodes.values())),
    )
    # Whatever cluster.yaml may not say is refused here, in the same words.
    return cluster_of(cluster_yaml(made), "cluster.yaml (not written)")


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
            f"{host} has Slurm {found.slurm}, which gpuspawner was not tried with. Install "
            f"{' or '.join(TESTED)} (Debian 12 has it)."
        )
    if not found.engine:
        note(f"No Docker Engine answered on {host}: start it there.")


def _engine(
    arguments: argparse.Namespace, options: SlurmOptions, host: str, found: HostInventory
) -> tuple[str, TLS | None]:
    if found.hostname == options.controller:
        return LOCAL_ENGINE, None
    if arguments.tls:
        folder = Path(arguments.tls).resolve()
        names = (str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem"))
        template = arguments.engine
        if template == "ssh://{host}":
            template = "https://{host}:2376"
        return template.replace("{host}", host), TLS(*names)
    return arguments.engine.replace("{host}", host), None


def _sampler(template: str, node: Node, host: str) -> str:
    if template and node.engine == LOCAL_ENGINE:
        return f"http://127.0.0.1:{template.rstrip('/').rpartition(':')[2]}"
    return template.replace("{host}", host)


def _address(host: str, found: HostInventory, options: SlurmOptions) -> str:
    """The IP address at which the other machines reach a host. Raises ConfigError."""
    own = found.hostname == options.controller
    name = options.address if own and options.address else host
    try:
        told = str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
    except OSError:
        raise ConfigError(
            f"The address of {name} cannot be found. Give it in place of the name."
        ) from None
    if told.startswith("127."):
        more = f"--controller {found.hostname}=ADDRESS" if own else "its address in place of it"
        raise ConfigError(f"{name} is {told} here, which no other machine reaches. Give {more}.")
    return told


# The words of the command.


def _named(word: str) -> tuple[str, str]:
    host, equals, file = word.partition("=")
    if not _HOST.fullmatch(host) or (equals and not file):
        raise ConfigError(f"{word!r} is no host: write its name or address, or HOST=FILE.")
    return host, file


def _controller(word: str) -> tuple[str, str]:
    host, _, address = word.partition("=")
    host = host or socket.gethostname().partition(".")[0]
    if not _HOST.fullmatch(host) or (address and not _HOST.fullmatch(address)):
        raise ConfigError(f"{word!r} is no host: write --controller NAME or NAME=ADDRESS.")
    return host, address


def _hours(number: int) -> int:
    if not 1 <= number <= 8760:
        raise ConfigError(f"--hours {number}: write 1 to 8760.")
    return number


def _more(words: Sequence[str]) -> dict[str, str]:
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        if not _SETTING.fullmatch(name) or not value or not value.isprintable() or "#" in value:
            raise ConfigError(f"--set {word!r}: write NAME=VALUE as slurm.conf has it.")
        found[name] = value
    return found
