"""Servers of the hub that compose.yaml starts. Real: images of hub and servers, compose, hub, proxy
and PostgreSQL in containers of an engine in a Debian 12 of its own, connections from members'
kernels. Stand-ins: the images of proxy and PostgreSQL are made here, by the names that a registry
has them by, and the GPUs are simulated."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import yaml

from tests.support import images, steps
from tests.support.attacks import Attempts
from tests.support.box import (
    DOCKER_MACHINE,
    POSTGRES,
    PROXY,
    Box,
    compose_plugin,
    prepare_images,
)
from tests.support.engine import PrivateEngine
from tests.support.processes import REPO
from tests.support.site import SECRET, SECRETS, ProviderSite

PLUGINS = "/usr/libexec/docker/cli-plugins"
COMPOSE = REPO / "hub_config" / "compose.yaml"

CONNECT = """
import json, socket
found = {{}}
for address, port in {targets!r}:
    try:
        with socket.create_connection((address, port), timeout=3):
            found[f"{{address}}:{{port}}"] = True
    except OSError:
        found[f"{{address}}:{{port}}"] = False
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def site(
    soak: None,
    hubs: None,
    processes: None,
    engine: PrivateEngine,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ProviderSite]:
    folder = tmp_path_factory.mktemp("compose")
    images.ensure_images(engine, (images.BASE,))
    prepare_images(engine, PROXY, POSTGRES)
    with (
        Box(engine, folder / "copy", DOCKER_MACHINE) as box,
        ProviderSite(box, folder, members=["mallory", "victoria"]) as site,
    ):
        box.install(compose_plugin(), PLUGINS)
        services = yaml.safe_load(COMPOSE.read_text())["services"]
        for image, name in (
            (images.DEBIAN, "debian:bookworm-slim"),
            (images.BASE, "gpuspawner/base:latest"),
            (PROXY.tag, services["proxy"]["image"]),
            (POSTGRES.tag, services["db"]["image"]),
        ):
            box.load(image, name)
        start(site)
        yield site


def start(site: ProviderSite) -> None:
    """Follow the page, up to the command `gpuspawner`."""
    box = site.box
    clone, configuration, up, command, *_ = steps.filled_in(steps.COMPOSE, site.typed)
    box.run(clone)
    assert SECRET in configuration
    box.run(configuration, typed=SECRETS)
    site.edit()
    # As the page says for a machine without a GPU.
    without = yaml.safe_load(box.run("cat hub_config/compose.yaml"))
    del without["services"]["hub"]["deploy"]
    box.write("hub_config/compose.yaml", yaml.safe_dump(without))
    box.run(up, timeout=600)
    site.wait()
    box.run(command)


def test_compose_servers_reach_only_the_hub_api(site: ProviderSite, attempt: Attempts) -> None:
    box = site.box
    members = [site.member(name) for name in ("mallory", "victoria")]
    for member in members:
        member.spawn({"environment": "base", "gpus": "1"})
    mallory = members[0]
    own, hers = (address_of(box, f"jupyter-{member.name}") for member in members)
    machine = box.run("ip -4 -o addr show tap0 | awk '{print $4}' | cut -d/ -f1").strip()
    gateway = "172.30.0.1"

    wanted = {
        "her server": (hers, 8888),
        "the proxy's API": (gateway, 8001),
        "the proxy's API at the machine's own address": (machine, 8001),
        "the proxy": (gateway, 8000),
        "the accounting service": (gateway, 10190),
        "the database": (gateway, 5432),
        "the database at the machine's own address": (machine, 5432),
    }
    for name in containers(box):
        for address in addresses_of(box, name):
            wanted |= {f"port {port} of {name}": (address, port) for port in (5432, 8001)}
    open_to_her = {"the hub's API": (gateway, 8081), "her own server": (own, 8888)}

    targets = [*wanted.values(), *open_to_her.values()]
    found = json.loads(mallory.run(CONNECT.format(targets=targets)))
    for what, (address, port) in wanted.items():
        attempt(what, refused=not found[f"{address}:{port}"])
    for what, (address, port) in open_to_her.items():
        assert found[f"{address}:{port}"], what

    # Each of them is there: the machine itself reaches them.
    for address, port in ((hers, 8888), ("127.0.0.1", 8001), ("127.0.0.1", 10190)):
        box.run(f"timeout 5 bash -c ': < /dev/tcp/{address}/{port}'")
    tables = box.run(
        "docker exec gpuspawner-db-1 psql -U gpuspawner -Atc"
        " 'select count(*) from leases' gpuspawner"
    )
    assert int(tables.split()[0]) == 2


def test_restore_brings_back_what_was_there_at_the_backup(site: ProviderSite) -> None:
    box = site.box
    *_, backup, restore = steps.filled_in(steps.COMPOSE, site.typed)
    site.member("mallory")  # has an account from the first sign-in on
    box.run("gpuspawner grant mallory 7 --reason 'before the backup'")
    box.run(backup)
    box.run("gpuspawner grant mallory 9 --reason 'after the backup'")
    box.run(restore, timeout=300)
    site.wait()
    statement = box.run("gpuspawner statement mallory")
    assert "before the backup" in statement and "after the backup" not in statement
    box.run("test -s /var/backups/gpuspawner-hub/jupyterhub_cookie_secret")


def containers(box: Box) -> list[str]:
    """The containers of compose."""
    names = box.run("docker ps --format '{{.Names}}' --filter label=com.docker.compose.project")
    assert len(names.split()) == 3, names
    return names.split()


def addresses_of(box: Box, container: str) -> list[str]:
    template = "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}"
    return box.run(f"docker inspect -f '{template}' {container}").split()


def address_of(box: Box, container: str) -> str:
    (address,) = addresses_of(box, container)
    return address
