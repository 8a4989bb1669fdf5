"""Real: Docker Engine, containers, networks, JupyterHub, proxy, SQLite. Stand-in: NVIDIA's hook."""

from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.cli.app import main
from gpuspawner.devices.simulated import SimulatedDevices
from gpuspawner.engines.preflight import (
    LABEL_CHECK,
    Status,
    check_directory,
    check_hub_reachable,
    network_gateway,
)
from tests.support.engine import PrivateEngine
from tests.support.hub import HubProcess
from tests.support.preloaded import PRELOADED, PYTHONPATH, Forked
from tests.support.processes import BIN, PATIENCE, free_port, system_path, wait_for

FLEET = "2xT4"
NETWORK = "notebooks"
WORKSPACE = "\nc.GPUDockerSpawner.workspace = {!r}\n"
AUTO = '\nc.GPUDockerSpawner.gpu_injection = "auto"\n'
NO_CONTAINERS = "--no-containers"

GOOD = """
c = get_config()
c.JupyterHub.spawner_class = "gpuspawner.spawners.docker.GPUDockerSpawner"
c.JupyterHub.hub_ip = {hub_ip!r}
c.JupyterHub.hub_port = {hub_port}
c.GPUDockerSpawner.network_name = {network!r}
c.GPUDockerSpawner.image = {image!r}
c.GPUDockerSpawner.gpu_injection = "device_requests"
c.GPUDockerSpawner.disk_limit = "1G"
c.GPUDockerSpawner.workspace = "gpuspawner-work-{{username}}"
c.GPUDevices.source = "simulated:{fleet}"
c.GPUDatabase.url = "sqlite:///hub.sqlite"
import gpuspawner
gpuspawner.add_services(c, cull_idle_after=3600)
"""
"""A configuration without a fault; each test adds one."""


@dataclass
class Checked:
    """What ``gpuspawner check --json`` said."""

    code: int
    checks: list[dict[str, str]]

    def __getitem__(self, name: str) -> dict[str, str]:
        return next(check for check in self.checks if check["name"] == name)

    @property
    def red(self) -> list[str]:
        return [check["name"] for check in self.checks if check["status"] == "fail"]


Check = Callable[..., Checked]
Process = subprocess.Popen[bytes] | Forked


@pytest.fixture
def notebooks(clean_engine: PrivateEngine) -> str:
    """The gateway of a network for servers, on an engine whose devices are the simulated ones."""
    clean_engine.set_devices(SimulatedDevices(FLEET)._healthy)
    clean_engine.client.create_network(NETWORK)
    return network_gateway(clean_engine.client, NETWORK)


@pytest.fixture
def check(
    clean_engine: PrivateEngine,
    images: Any,
    notebooks: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Check]:
    """Run the command, in this process, with the good configuration and some lines more."""
    monkeypatch.chdir(tmp_path)
    for name, value in environment(clean_engine.url).items():
        monkeypatch.setenv(name, value)

    def run(more: str = "", *arguments: str, **changes: Any) -> Checked:
        values = {"hub_ip": notebooks, "hub_port": free_port(), "network": NETWORK}
        values |= {"image": images.INSTANT, "fleet": FLEET, **changes}
        (tmp_path / "jupyterhub_config.py").write_text(GOOD.format(**values) + more)
        code = main(["check", "--json", *arguments])
        return Checked(code, json.loads(capsys.readouterr().out)["checks"])

    yield run
    assert left(clean_engine) == []
    volumes = clean_engine.client.volumes()["Volumes"] or []
    assert [v["Name"] for v in volumes if "check" in v["Name"]] == []


def command(tmp_path: Path, docker_host: str, *arguments: str) -> tuple[Process, Path]:
    """The command as an admin starts it, and what it prints."""
    printed = tmp_path / "printed"
    streams = [os.devnull, str(printed), str(printed)]
    words = ["-m", "gpuspawner", "check", *arguments]
    return PRELOADED.start(words, tmp_path, environment(docker_host), streams), printed


def environment(docker_host: str) -> dict[str, str]:
    """Of a hub's admin: the engine, the proxy on the PATH, this checkout."""
    return {
        "PATH": system_path(BIN),
        "PYTHONPATH": PYTHONPATH,
        "DOCKER_HOST": docker_host,
        "HOME": os.environ.get("HOME", "/"),
    }


def left(engine: PrivateEngine) -> list[str]:
    """The names of the containers that checks left."""
    found = engine.client.containers(all=True, filters={"label": LABEL_CHECK})
    return [container["Names"][0] for container in found]


# All green.


def test_check_of_a_valid_hub_passes_before_first_start(check: Check, tmp_path: Path) -> None:
    checked = check()
    assert checked.code == 0, checked
    assert {c["name"]: c["status"] for c in checked.checks} == {
        "configuration": "ok",
        "catalog": "ok",
        "database": "ok",
        "devices": "ok",
        "engine": "ok",
        "image": "ok",
        **dict.fromkeys(("GPU injection", "GPUs stay"), "ok"),
        "hub API": "ok",
        "disk limit": "ok",
        "workspace": "ok",
        "proxy": "ok",
        "accounting": "ok",
        "idle culler": "ok",
    }
    device = next(iter(SimulatedDevices(FLEET)._healthy))
    assert f"a container sees exactly {device}" in checked["GPU injection"]["text"]
    assert "this check listened in its place" in checked["hub API"]["text"]
    assert [path.name for path in tmp_path.iterdir()] == ["jupyterhub_config.py"], (
        "a check makes no database"
    )


def test_check_reaches_a_running_hub_and_its_proxy(
    check: Check,
    clean_engine: PrivateEngine,
    images: Any,
    hub_factory: Callable[..., HubProcess],
    tmp_path: Path,
) -> None:
    hub = hub_factory(hub_ip=clean_engine.gateway, external_proxy=True)
    url = f"http://{hub.hub_ip}:{hub.hub_port}"
    for image in (images.BASE, images.INSTANT):  # by python3, and by bash only
        for path, status in (("/hub/api/", Status.OK), ("/elsewhere/hub/api/", Status.FAIL)):
            finding = check_hub_reachable(clean_engine.client, image, "bridge", url + path)
            assert finding.status is status, finding
    config = str(hub.folder / "jupyterhub_config.py")
    process, printed = command(tmp_path, clean_engine.url, "-f", config, "--json")
    assert process.wait(timeout=60 * PATIENCE) == 1
    found = Checked(1, json.loads(printed.read_text())["checks"])
    assert found["configuration"]["status"] == "fail", "SimpleLocalProcessSpawner leases nothing"
    assert found["hub API"]["status"] == "unchecked", "local servers need no network"

    lines = f"""
c.ConfigurableHTTPProxy.should_start = False
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{hub.proxy_port}"
"""

    def proxy(more: str) -> str:
        found = check(lines + more, NO_CONTAINERS)["proxy"]
        return f"{found['status']}: {found['text']}"

    right = f"c.ConfigurableHTTPProxy.auth_token = {hub._proxy_token!r}"
    assert "CONFIGPROXY_AUTH_TOKEN" in proxy(""), "it has no token"
    assert "does not take" in proxy("c.Proxy.auth_token = 'wrong'")
    assert proxy(right).startswith("ok: ")
    hub.stop()
    assert "is not responding" in proxy(right)


def test_check_table_is_plain_text_with_a_summary(check: Check, tmp_path: Path) -> None:
    check("", NO_CONTAINERS)
    process, file = command(tmp_path, "unix:///nowhere.sock")
    assert process.wait(timeout=60 * PATIENCE) == 1
    printed = file.read_text()
    assert "\x1b" not in printed
    lines = printed.splitlines()
    assert any(line.startswith("ok           proxy ") for line in lines)
    assert any(line.startswith("FAIL         engine ") for line in lines)
    assert any(line.startswith("not checked  image ") for line in lines)
    assert lines[-1] == "7 ok, 1 FAIL, 5 not checked."


# Red, each fault by its own check.


def test_missing_engine_fails_with_a_remedy(check: Check) -> None:
    checked = check('\nc.GPUDockerSpawner.client_kwargs = {"base_url": "unix:///nowhere.sock"}\n')
    assert (checked.code, checked.red) == (1, ["engine"])
    assert checked["engine"]["text"] == (
        "The Docker Engine at unix:///nowhere.sock is not responding: No such file or directory."
    )
    assert "systemctl start docker" in checked["engine"]["remedy"]
    assert checked["GPU injection"]["status"] == "unchecked", "and not silently green"


def test_every_catalog_image_and_dataset_is_checked(
    check: Check, images: Any, tmp_path: Path
) -> None:
    catalog = tmp_path / "catalog.yaml"
    catalog.write_text(
        "environments:\n"
        f"  - {{slug: here, image: '{images.INSTANT}', devices: {{max: 0}}}}\n"
        "  - {slug: away, image: 'gpuspawner/nowhere:1'}\n"
        "datasets: {mnist: {source: /nowhere/mnist}}\n"
    )
    checked = check(f"\nc.GPUSpawnerMixin.catalog = {str(catalog)!r}\n")
    assert (checked.code, checked.red) == (1, ["image", "datasets"])
    assert [c["status"] for c in checked.checks if c["name"] == "image"] == ["fail", "ok"]
    assert checked["image"]["remedy"] == "docker pull gpuspawner/nowhere:1"
    assert checked["GPU injection"]["status"] == "ok", "tried with the image that is there"
    assert checked["datasets"]["text"] == "Not there: mnist (/nowhere/mnist)."


def test_budget_of_the_host_is_compared_with_the_catalog(
    check: Check, images: Any, tmp_path: Path
) -> None:
    catalog = tmp_path / "catalog.yaml"
    catalog.write_text(
        "environments:\n"
        f"  - {{slug: torch, image: '{images.INSTANT}', mem_guarantee: 32G}}\n"
        f"  - {{slug: files, image: '{images.INSTANT}', devices: {{max: 0}}}}\n"
    )
    config = f"""
c.GPUSpawnerMixin.catalog = {str(catalog)!r}
c.GPUDockerSpawner.mem_guarantee = "4G"
c.GPUHost.memory = "20G"
c.GPUHost.memory_per_free_gpu = "7G"
"""
    checked = check(config, NO_CONTAINERS)
    assert (checked.code, checked.red) == (1, ["host budget", "host budget"])
    large, starved = [c for c in checked.checks if c["name"] == "host budget"]
    assert large["text"].startswith("A server of torch is guaranteed 32.0 GB of memory, but")
    assert "files would wait for 4.0 GB of memory (2.0 GB free)" in starved["text"]
    assert 'c.GPUHost.memory_per_free_gpu = "6G" at most' in starved["remedy"]
    catalog.write_text(catalog.read_text().replace("32G", "16G"))
    checked = check(f'{config}c.GPUHost.memory_per_free_gpu = "6G"\n', NO_CONTAINERS)
    assert (checked.code, checked["host budget"]["status"]) == (0, "ok")
    alone = '\nc.GPUDockerSpawner.mem_guarantee = "4G"\nc.GPUHost.memory = "7G"\n'
    single = check(alone, NO_CONTAINERS)
    assert single["host budget"]["remedy"].startswith(
        'Write c.GPUDockerSpawner.mem_guarantee = "3G" at most'
    )


def test_missing_image_leaves_the_hub_address_unchecked(check: Check) -> None:
    checked = check(image="gpuspawner/nowhere:1")
    assert (checked.code, checked.red) == (1, ["image"])
    assert checked["hub API"]["status"] == "unchecked"


def test_missing_device_network_and_workspace_fail(
    check: Check, clean_engine: PrivateEngine, tmp_path: Path
) -> None:
    """The engine does not know the device that the hub has."""
    clean_engine.set_devices(["GPU-another"])
    root = tmp_path / "work"
    missing = check(WORKSPACE.format(f"{root}/{{username}}"), network="nowhere")
    assert (missing.code, missing.red) == (1, ["GPU injection", "hub API", "workspace"])
    assert "unknown device" in missing["GPU injection"]["text"]
    assert "nvidia-smi -L" in missing["GPU injection"]["remedy"]
    assert missing["hub API"]["remedy"] == "docker network create nowhere"
    assert missing["workspace"]["remedy"].endswith(f"sudo mkdir -p {root}")


def test_hub_on_loopback_fails_with_a_usable_address(
    check: Check, notebooks: str, tmp_path: Path
) -> None:
    root = tmp_path / "work"
    root.mkdir()
    checked = check(WORKSPACE.format(f"{root}/{{username}}") + AUTO, hub_ip="127.0.0.1")
    assert (checked.code, checked.red) == (1, ["hub API"])
    assert "does not reach the Hub's API at http://127.0.0.1" in checked["hub API"]["text"]
    assert f"such as {notebooks}, this network's gateway" in checked["hub API"]["remedy"]
    assert checked["GPU injection"]["status"] == "unchecked", "devices that are simulated"
    assert checked["workspace"]["status"] == "ok" and list(root.iterdir()) == []


def test_missing_nvml_fails_and_a_remote_hub_is_unchecked(check: Check) -> None:
    checked = check('\nc.GPUDevices.source = "nvml"\n', hub_ip="192.0.2.1")
    assert checked["hub API"]["status"] == "unchecked"
    assert "cannot listen in its place at 192.0.2.1" in checked["hub API"]["text"]
    if glob.glob("/dev/nvidia[0-9]*"):
        assert checked["devices"]["text"].startswith("NVML, driver")
        return
    assert (checked.code, checked.red) == (1, ["devices"])
    assert "nvidia-smi" in checked["devices"]["remedy"]
    assert checked["GPU injection"]["text"] == "There is no device to try with."


def test_unwritable_workspace_directory_fails(clean_engine: PrivateEngine, images: Any) -> None:
    finding = check_directory(clean_engine.client, images.INSTANT, "/proc/sys")
    assert finding.status is Status.FAIL
    assert "cannot be made in /proc/sys: mkdir:" in finding.text


def test_configuration_faults_are_found_without_containers(check: Check, tmp_path: Path) -> None:
    (tmp_path / "catalog.yaml").write_text("environments:\n  - {slug: x, imag: y}\n")
    broken_config = """
c.GPUSpawnerMixin.catalog = "catalog.yaml"
c.GPUDockerSpawner.workspace = ""
c.ConfigurableHTTPProxy.command = ["a-proxy-that-is-not-there"]
c.JupyterHub.services = []
c.JupyterHub.load_roles = []
c.GPUDatabase.url = "sqlite:////proc/hub.sqlite"
"""
    checked = check(broken_config, NO_CONTAINERS)
    faults = ["catalog", "database", "workspace", "proxy", "accounting", "idle culler"]
    assert (checked.code, checked.red) == (1, faults)
    assert "imag" in checked["catalog"]["text"]
    assert "npm install" in checked["proxy"]["remedy"]
    assert "add_services(c)" in checked["accounting"]["remedy"]
    assert "hub.sqlite cannot be made by" in checked["database"]["text"]
    assert checked["database"]["remedy"] == (
        "The hub's user must be able to write /proc and the files in it."
    )

    broken = tmp_path / "broken-proxy"
    broken.write_text("#!/bin/sh\necho node: not found >&2\nexit 127\n")
    broken.chmod(0o755)
    partial_config = f"""
c.GPUDockerSpawner.workspace = ""
c.DockerSpawner.volumes = {{"a": "/b"}}
c.ConfigurableHTTPProxy.command = [{str(broken)!r}]
c.JupyterHub.load_roles = [{{"name": "a", "services": ["gpu", "idle-culler"], "scopes": [
    "list:users", "read:groups", "admin:servers", "access:services!service=gpu"]}}]
"""
    checked = check(partial_config, NO_CONTAINERS)
    assert (checked.code, checked.red) == (1, ["proxy", "idle culler"])
    assert checked["workspace"]["status"] == "unchecked"
    assert checked["proxy"]["text"] == f"{broken} does not run: node: not found."
    assert "lacks read:users:activity" in checked["idle culler"]["text"], (
        "admin:servers has read and delete"
    )


def test_foreign_or_unloadable_spawner_fails_the_check(check: Check) -> None:
    checked = check('\nc.JupyterHub.spawner_class = "docker"\n', NO_CONTAINERS)
    assert (checked.code, checked.red) == (1, ["configuration", "image", "workspace"])
    assert '"gpu-docker"' in checked["configuration"]["remedy"]
    checked = check('\nc.JupyterHub.spawner_class = "no.such.Spawner"\n', NO_CONTAINERS)
    assert (checked.code, checked.red) == (1, ["configuration"])
    assert checked["engine"]["status"] == "unchecked"


def test_check_without_containers_creates_none(check: Check, clean_engine: PrivateEngine) -> None:
    since = clean_engine.client.info()["SystemTime"]
    checked = check("", NO_CONTAINERS)
    assert checked.code == 0
    unchecked = [c["name"] for c in checked.checks if c["status"] == "unchecked"]
    assert unchecked == ["GPU injection", "hub API"]
    until = clean_engine.client.info()["SystemTime"]
    created = {"event": "create", "type": "container"}
    events = clean_engine.client.events(since=since, until=until, filters=created, decode=True)
    assert list(events) == [], "to the nanosecond: another check may have ended just before"


@pytest.fixture
def hanging_image(clean_engine: PrivateEngine, images: Any) -> Iterator[str]:
    """An image whose shell runs for minutes, and whatever a check tries in it."""
    client, tag = clean_engine.client, "gpuspawner/hangs:test"
    write = "printf '#!/usr/bin/perl\\nsleep 600;\\n' > /new; chmod 755 /new; mv /new /bin/sh"
    made = client.create_container(images.INSTANT, ["bash", "-c", write])["Id"]
    client.start(made)
    assert client.wait(made)["StatusCode"] == 0
    client.commit(made, *tag.split(":"))
    client.remove_container(made)
    yield tag
    client.remove_image(tag, force=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_check_leaves_no_container(
    check: Check,
    clean_engine: PrivateEngine,
    hanging_image: str,
    tmp_path: Path,
    number: int,
) -> None:
    check("", NO_CONTAINERS, image=hanging_image)  # writes the configuration
    process, printed = command(tmp_path, clean_engine.url)
    wait_for(lambda: left(clean_engine), "a container of the check")
    process.send_signal(number)
    assert process.wait(timeout=60 * PATIENCE) == 130, printed.read_text()
    assert "Traceback" not in printed.read_text()
    assert left(clean_engine) == []
