"""Servers on the network that the steps in docs make, under the rules of SECURITY.md. Real: an
engine with a firewall in a network of its own, its containers, connections from within them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest
from docker.types import IPAMConfig, IPAMPool

from tests.support import steps
from tests.support.attacks import Attempts
from tests.support.closed_engine import IMAGE, ClosedEngine
from tests.support.processes import REPO, wait_for

METADATA = "169.254.169.254"


@pytest.fixture(scope="module")
def closed(engines: None) -> Iterator[ClosedEngine]:
    with ClosedEngine() as engine:
        yield engine


def shipped_network() -> list[str]:
    """The words of ``docker network create`` in the steps for Compose."""
    command = steps.command(steps.COMPOSE, "docker network create ")
    return shlex.split(command)[3:-1]


def shipped_rules() -> list[list[str]]:
    """The lines of SECURITY.md that begin with ``iptables``."""
    text = (REPO / "SECURITY.md").read_text()
    return [shlex.split(line) for line in re.findall(r"^iptables .*$", text, re.MULTILINE)]


def test_shipped_rules_isolate_servers_from_each_other_and_host(
    closed: ClosedEngine, attempt: Attempts
) -> None:
    words = shipped_network()
    subnet, gateway = (words[words.index(name) + 1] for name in ("--subnet", "--gateway"))
    name, _, value = words[words.index("-o") + 1].partition("=")
    pool = IPAMConfig(pool_configs=[IPAMPool(subnet=subnet, gateway=gateway)])
    closed.client.create_network("gpuspawner", driver="bridge", options={name: value}, ipam=pool)
    closed.client.create_network("open", driver="bridge")

    # On a network without the option a server reaches its neighbour.
    one, _ = closed.server("open")
    _, neighbour = closed.server("open")
    assert closed.connects(one, neighbour, 8888)

    mallory, own = closed.server("gpuspawner")
    _, victoria = closed.server("gpuspawner")
    for port in (8888, 22):
        attempt(f"her port {port}", refused=not closed.connects(mallory, victoria, port))
    attempt("a server of another network", refused=not closed.connects(mallory, neighbour, 8888))
    assert closed.connects(mallory, own, 8888), "its own server"

    # The machine: the hub's API, a database that listens too widely, a cloud's metadata.
    cloud, _ = closed.server("open")
    machine = closed._daemon_pid()
    closed.machine("ip", "link", "add", "m0", "type", "veth", "peer", "m1", "netns", str(cloud))
    closed.machine("ip", "addr", "add", "169.254.169.1/24", "dev", "m0")
    closed.machine("ip", "link", "set", "m0", "up")
    assert closed.within(cloud, ["ip", "addr", "add", f"{METADATA}/24", "dev", "m1"]) == 0
    assert closed.within(cloud, ["ip", "link", "set", "m1", "up"]) == 0
    for port in (8081, 5432):
        closed.listen("0.0.0.0", port)
        assert closed.connects(mallory, gateway, port)
    assert closed.connects(mallory, METADATA, 8888), "before the rules it is reached"

    rules = shipped_rules()
    assert len(rules) == 2
    for rule in rules:
        assert subnet in rule
        closed.machine(*rule)
    attempt("the database of the machine", refused=not closed.connects(mallory, gateway, 5432))
    attempt("the cloud's metadata", refused=not closed.connects(mallory, METADATA, 8888))
    assert closed.connects(mallory, gateway, 8081), "the hub's API has to be reached"
    assert closed.connects(machine, victoria, 8888), "and the hub reaches every server"


def test_only_the_hub_reaches_server_ports_on_a_node(
    closed: ClosedEngine, attempt: Attempts
) -> None:
    """The line of the tutorial on a second machine, with the addresses that it has there."""
    text = (REPO / "docs/tutorials/a-second-machine.md").read_text()
    (line,) = re.findall(r"^iptables -I DOCKER-USER -i eth0 .*$", text, re.MULTILINE)
    client = closed.client
    client.create_network("nodes", driver="bridge")
    host = client.create_host_config(
        network_mode="nodes", port_bindings={8888: ("10.0.0.2", 32000)}
    )
    closed.machine("ip", "link", "add", "eth0", "type", "bridge")
    closed.machine("ip", "addr", "add", "10.0.0.2/24", "dev", "eth0")
    closed.machine("ip", "link", "set", "eth0", "up")
    made = client.create_container(IMAGE, host_config=host, ports=[8888])
    client.start(made["Id"])
    hub, other = (beside(closed, f"10.0.0.{number}", f"n{number}") for number in (1, 9))
    for each in (hub, other):
        wait_for(lambda x=each: closed.connects(x, "10.0.0.2", 32000), "the server's port")
    closed.machine(*shlex.split(line))
    attempt("the port of a server", refused=not closed.connects(other, "10.0.0.2", 32000))
    assert closed.connects(hub, "10.0.0.2", 32000), "the hub reaches it"


def beside(closed: ClosedEngine, address: str, link: str) -> int:
    """A machine beside the engine's, on its eth0: a process in its network."""
    pid, _ = closed.server("nodes")
    closed.machine("ip", "link", "add", link, "type", "veth", "peer", "out", "netns", str(pid))
    closed.machine("ip", "link", "set", link, "master", "eth0", "up")
    for words in (("addr", "add", f"{address}/24"), ("link", "set", "up")):
        assert closed.within(pid, ["ip", *words, "dev", "out"]) == 0
    return pid
