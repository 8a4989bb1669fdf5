"""Checks of what a cluster needs: Slurm's daemons, and every node."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import docker
from docker.errors import DockerException, ImageNotFound
from requests import RequestException

from ..catalog.loader import Catalog
from ..core.errors import GPUSpawnerError
from ..devices.models import Inventory
from ..engines.preflight import CheckFinding, Status, check_engine, check_sees, no_answer
from ..services import utcnow
from ..slurm.cluster import Cluster, Node
from ..slurm.config import TESTED, counts, is_tested, shared_devices
from ..slurm.images import connector
from ..slurm.job_spec import devices_of
from ..slurm.jobs import behind, stays_behind
from ..slurm.programs import Slurm
from ..slurm.telemetry import trouble_of
from .check_hub import check_reachable
from .check_servers import (
    NO_CONTAINERS,
    check_clock,
    check_injection,
    first_present,
    images_of,
    root_of,
)
from .hub import HubSettings

READY = frozenset(("idle", "mixed", "allocated", "completing", "planned", "reserved"))
OFF = "~"
"""Suffix of a state: the node is off, to save power."""

_GPUS = re.compile(r"gpu(?::([^:,(]+))?:(\d+)")
_SHARDS = re.compile(r"shard(?::[^:,(]+)?:(\d+)")


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node according to ``sinfo``."""

    state: str
    """With its flags: ``idle``, ``down*``, ``idle~``."""
    reason: str
    gpus: Mapping[str, int]
    """By type."""
    shards: int
    """All its GPUs together."""
    version: str

    @property
    def off(self) -> bool:
        """True if it is off to save power."""
        return self.state.endswith(OFF)


def node_states(slurm: Slurm) -> dict[str, NodeState]:
    """Return the state of every node by name. Raises SlurmUnavailable."""
    said = slurm.run("sinfo", "--Node", "--noheader", "--format=%N|%T|%v|%G|%E")
    found = {}
    for line in said.splitlines():
        name, state, version, gres, reason = line.split("|", 4)
        gpus = {kind: int(number) for kind, number in _GPUS.findall(gres)}
        shards = sum(map(int, _SHARDS.findall(gres)))
        found[name] = NodeState(state, "" if reason == "none" else reason, gpus, shards, version)
    return found


SOCKET = "/run/munge/munge.socket.2"


def check_slurm(
    hub: HubSettings, catalog: Catalog | None, cluster: Cluster, containers: bool
) -> Iterator[CheckFinding]:
    """Yield everything about servers on the nodes of a cluster."""
    states: Mapping[str, NodeState] = {}
    slurm = Slurm(conf=cluster.slurm_conf)
    yield _check_munge(cluster)
    finding = _check_slurm_controller(slurm)
    yield finding
    if finding.status is Status.OK:
        yield _check_accounting(slurm, cluster)
        try:
            states = node_states(slurm)
        except GPUSpawnerError as error:
            yield CheckFinding("nodes", Status.FAIL, error.message)
    if states:  # else the failure was reported already
        yield from (_check_node(node, states.get(node.name)) for node in cluster.nodes)
    clients: dict[Node, docker.APIClient] = {}
    for node in cluster.nodes:
        if (state := states.get(node.name)) and state.off:
            text = "The node is off to save power: nothing on it was checked."
            yield CheckFinding(f"engine {node.name}", Status.UNCHECKED, text)
            continue
        finding, client = _check_engine(node, bool(getattr(hub.spawner, "job_cgroup", "")))
        yield finding
        if client is not None:
            clients[node] = client
        if clock := check_clock(node, client):
            yield clock
        if node.sampler:
            yield check_sampler(node)
    images = images_of(hub, catalog)
    yield from (_check_image(image, clients) for image in images if clients)
    for node, client in clients.items():
        yield from _check_servers(node, client, hub, images, containers)
    yield _check_workspaces(hub, clients, images, containers)


# Slurm's daemons.


def _check_munge(cluster: Cluster) -> CheckFinding:
    name, socket = "munge", _munge_socket(cluster)
    try:
        done = subprocess.run(
            ["munge", "-S", socket, "-n"], capture_output=True, text=True, timeout=10, check=False
        )
    except FileNotFoundError:
        text = "The program munge is not on this machine."
        return CheckFinding(name, Status.FAIL, text, "apt-get install munge")
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess([], 1, "", "munge: no answer within 10 seconds")
    if done.returncode:
        said = done.stderr.strip().partition("\n")[0].removeprefix("munge: ")
        text = f"munged is not responding at {socket}: {said.rstrip('.')}."
        return CheckFinding(name, Status.FAIL, text, "sudo systemctl start munge")
    return CheckFinding(name, Status.OK, f"munged answers at {socket}")


def _munge_socket(cluster: Cluster) -> str:
    path = cluster.slurm_conf or os.environ.get("SLURM_CONF") or "/etc/slurm/slurm.conf"
    with suppress(OSError):
        written = Path(path).read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^AuthInfo=(?:.*,)?socket=([^,\s]+)", written, re.M | re.I):
            return found[1]
    return SOCKET


def _check_slurm_controller(slurm: Slurm) -> CheckFinding:
    name = "controller"
    remedy = (
        "On the controller: systemctl status slurmctld munge. The same /etc/munge/munge.key and "
        "the right time belong on every machine."
    )
    try:
        version = slurm.run("sinfo", "--version").split()[-1]
        said = " ".join(slurm.run("scontrol", "ping").split())
        if "UP" in said.split():
            slurm.run("sinfo", "--noheader")  # munge is used here, and with it the clocks
    except GPUSpawnerError as error:
        return CheckFinding(name, Status.FAIL, error.message, remedy)
    if not is_tested(version):
        text = f"This is Slurm {version}; gpuspawner is tested with {', '.join(TESTED)}."
        return CheckFinding(name, Status.FAIL, text, "Install one of these (Debian 12 has it).")
    if "UP" not in said.split():
        return CheckFinding(name, Status.FAIL, f"{said}.", remedy)
    return CheckFinding(name, Status.OK, f"Slurm {version}: {said}")


def _check_accounting(slurm: Slurm, cluster: Cluster) -> CheckFinding:
    name = "slurmdbd"
    try:
        known = slurm.run("sacctmgr", "--noheader", "--parsable2", "show", "cluster")
        lacks = behind(slurm) if stays_behind(slurm) else 0
    except GPUSpawnerError as error:
        remedy = "On the controller: systemctl status slurmdbd mariadb"
        return CheckFinding(name, Status.FAIL, error.message, remedy)
    if cluster.name not in [line.partition("|")[0] for line in known.splitlines()]:
        text = f"The accounting database does not know the cluster {cluster.name}."
        return CheckFinding(name, Status.FAIL, text, f"sacctmgr -i add cluster {cluster.name}")
    if lacks:
        text = f"The controller has {lacks} messages that the accounting database has not taken "
        text += "yet: batch jobs are paid once it knows of them."
        remedy = "If sdiag says so for long, on the controller: systemctl status slurmdbd mariadb"
        return CheckFinding(name, Status.FAIL, text, remedy)
    text = f"The accounting database knows the cluster {cluster.name}"
    return CheckFinding(name, Status.OK, text)


def _check_node(node: Node, seen: NodeState | None) -> CheckFinding:
    name = f"node {node.name}"
    if seen is None:
        text = "Slurm does not know this node, which is in cluster.yaml."
        remedy = "Write both again with gpuspawner slurm config, and copy them to every node."
        return CheckFinding(name, Status.FAIL, text, remedy)
    wanted, shards = counts(node), sum(node.slots_of(device) for device in shared_devices(node))
    what = _in_words(wanted, shards)
    if seen.state.rstrip(OFF) not in READY:
        why = f" ({seen.reason})" if seen.reason else ""
        text = f"It is {seen.state}{why}: it takes no jobs."
        remedy = f"On {node.name}: systemctl status slurmd. Once it is well: scontrol update "
        remedy += f"NodeName={node.name} State=RESUME"
        return CheckFinding(name, Status.FAIL, text, remedy)
    if (seen.gpus, seen.shards) != (wanted, shards):
        text = f"Slurm counts {_in_words(seen.gpus, seen.shards)}, and cluster.yaml {what}."
        remedy = "Write both again with gpuspawner slurm config, and restart slurmctld and slurmd."
        return CheckFinding(name, Status.FAIL, text, remedy)
    if seen.version and not seen.off and not is_tested(seen.version):
        text = f"Its slurmd is {seen.version}; gpuspawner is tested with {', '.join(TESTED)}."
        return CheckFinding(name, Status.FAIL, text, "Install one of these there.")
    return CheckFinding(name, Status.OK, f"{seen.state}, {what}")


def _in_words(gpus: Mapping[str, int], shards: int) -> str:
    said = ", ".join(f"{n} {kind}" for kind, n in gpus.items()) or "no GPUs"
    return f"{said}, {shards} shards" if shards else said


# Engines.


def _check_engine(node: Node, nested: bool) -> tuple[CheckFinding, docker.APIClient | None]:
    name = f"engine {node.name}"
    finding, client = check_engine(connector(node), node.engine)
    if client is None:
        remedy = f"On {node.name}: systemctl start docker"
        if "paramiko" in finding.text:
            remedy = "pip install 'gpuspawner[ssh]', or reach the engine over TLS."
        elif node.engine.startswith("ssh://"):
            remedy = f"As the hub's user: ssh {node.engine[6:]} docker version"
        elif node.tls is not None:
            remedy = (
                f"On {node.name}: journalctl -u docker. Its certificate has to name "
                f"{node.address}, and come from the same CA as the hub's."
            )
        return replace(finding, name=name, remedy=remedy), None
    try:
        wrong = _unfit(client.info(), nested)
    except (DockerException, RequestException) as error:
        return no_answer(name, error), client
    if wrong:
        return CheckFinding(name, Status.FAIL, *wrong), client
    return replace(finding, name=name), client


def check_sampler(node: Node) -> CheckFinding:
    """Check that the node's sampler reports what its devices do."""
    name = f"sampler {node.name}"
    if why := trouble_of(node, utcnow()):
        remedy = f"On {node.name}: systemctl status gpuspawner-sampler"
        return CheckFinding(name, Status.FAIL, f"{node.sampler}: {why.rstrip('.')}.", remedy)
    return CheckFinding(name, Status.OK, f"It reports at {node.sampler} what its GPUs do")


def _unfit(info: Mapping[str, Any], nested: bool) -> tuple[str, str] | None:
    """Return what is wrong with a node's engine, and the remedy, or None.

    ``nested``: containers must be in the control groups of their jobs.
    """
    if nested and str(info.get("CgroupVersion", "1")) != "1":
        return (
            "It has cgroup v2, but containers in their jobs' control groups are tested with v1.",
            'c.GPUSlurmSpawner.job_cgroup = "" leaves limits to the environments; or start the '
            "node's kernel with systemd.unified_cgroup_hierarchy=0",
        )
    if nested and info.get("CgroupDriver") == "systemd":
        return (
            "Its containers are in systemd's control groups, so a job's limits do not bind them.",
            '"exec-opts": ["native.cgroupdriver=cgroupfs"] in its /etc/docker/daemon.json, and '
            "restart Docker.",
        )
    return None


def _check_image(image: str, clients: Mapping[Node, docker.APIClient]) -> CheckFinding:
    found: dict[str, list[str]] = {}
    for node, client in clients.items():
        try:
            told = str(client.inspect_image(image)["Id"])
        except ImageNotFound:
            told = ""
        except (DockerException, RequestException) as error:
            return no_answer("image", error)
        found.setdefault(told, []).append(node.name)
    if missing := found.pop("", []):
        text = f"The image {image} is not on {', '.join(missing)}."
        remedy = f"gpuspawner catalog pull (or, on each of these: docker pull {image})"
        return CheckFinding("image", Status.FAIL, text, remedy)
    if len(found) > 1:
        text = f"The image {image} is not the same on all nodes: " + "; ".join(
            f"{', '.join(names)} {which[7:19]}" for which, names in found.items()
        )
        remedy = f"On each of these: docker pull {image}"
        return CheckFinding("image", Status.FAIL, f"{text}.", remedy)
    return CheckFinding("image", Status.OK, f"{image}: the same on {', '.join(*found.values())}")


# What servers find on a node.


def _check_servers(
    node: Node, client: docker.APIClient, hub: HubSettings, images: Sequence[str], containers: bool
) -> Iterator[CheckFinding]:
    names = (f"GPUs {node.name}", f"hub API {node.name}")
    image = first_present(client, images) if containers else ""
    if not image:
        why = "There is no image to try with." if containers else NO_CONTAINERS
        yield from (CheckFinding(name, Status.UNCHECKED, why) for name in names)
        return
    finding, _ = check_injection(client, image, hub, inventory_of(node))
    yield replace(finding, name=names[0])
    yield replace(check_reachable(client, image, hub), name=names[1])


def inventory_of(node: Node) -> Inventory:
    """Return the node's devices as those of this machine would be listed."""
    devices = devices_of(Cluster(name="", nodes=(node,)))
    return Inventory(devices=devices, observed_at=utcnow(), source="slurm")


def _check_workspaces(
    hub: HubSettings,
    clients: Mapping[Node, docker.APIClient],
    images: Sequence[str],
    containers: bool,
) -> CheckFinding:
    """Check that every node sees what the hub writes into the folder of workspaces."""
    name, template = "workspaces", str(getattr(hub.spawner, "workspace", ""))
    if not template.startswith("/"):
        text = "Members' files would stay on the node where they were written."
        remedy = "Share a folder among all machines (NFS), and set c.GPUDockerSpawner.workspace = "
        return CheckFinding(name, Status.FAIL, text, f'{remedy}"/srv/workspaces/{{username}}".')
    root, token = root_of(template), secrets.token_hex(12)
    tries = {node: (c, first_present(c, images)) for node, c in clients.items()}
    if not containers or not all(image for _, image in tries.values()) or not tries:
        why = "There is no image to try with." if containers else NO_CONTAINERS
        return CheckFinding(name, Status.UNCHECKED, why)
    path = os.path.join(root, f".gpuspawner-check-{token}")
    try:
        Path(path).write_text(token, encoding="utf-8")
    except OSError as error:
        text = f"The hub's machine cannot write in {root}: {error.strerror}."
        remedy = "Mount it here as on the nodes, and run this as the hub's user."
        return CheckFinding(name, Status.FAIL, text, remedy)
    try:
        for node, (client, image) in tries.items():
            if why := check_sees(client, image, root, os.path.basename(path), token):
                text = f"On {node.name} {root} is not what it is here: {why}."
                remedy = f"Mount it there too (/etc/fstab): the same folder, at {root}."
                return CheckFinding(name, Status.FAIL, text, remedy)
    finally:
        with suppress(OSError):
            os.unlink(path)
    names = ", ".join(node.name for node in clients)
    return CheckFinding(name, Status.OK, f"{root} is the same here and on {names}")
