"""Configurations in the style of public hubs, with DockerSpawner and with ours, in one hub.

Real: hub, proxy, accounting service, Docker Engine, device requests, Chromium. Each style is a
class with settings of its own; what the engine says of its two containers may differ in what
``docs/compatibility.md`` names and in nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from gpuspawner.devices.discovery import open_source
from gpuspawner.services import utcnow
from tests.support.compatibility import container_rows
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import message_of
from tests.support.hub import NAVIGATION, USER_PASSWORD, HubProcess
from tests.support.processes import free_port, wait_for

FLEET = "simulated:8xT4"

CONFIG = '''
import asyncio
from dockerspawner import DockerSpawner, SystemUserSpawner
from gpuspawner.spawners.docker import GPUDockerSpawner

c.DockerSpawner.image = {image!r}
c.DockerSpawner.use_internal_ip = True
c.DockerSpawner.remove = True
c.JupyterHub.cleanup_servers = False


class Form(DockerSpawner):
    """A form that the class itself defines."""

    def _options_form_default(self):
        return """
        <label for="course">Course</label>
        <select name="course" id="course"><option>ml<option>stats</select>
        <input name="week"> <input type="checkbox" name="extras" value="slides">
        """

    def options_from_form(self, form_data):
        week = form_data.get("week", [""])[0]
        return {{"course": form_data["course"][0], "week": int(week or 1)}}

    def get_env(self):
        env = super().get_env()
        env["COURSE"] = "{{course}} {{week}}".format(**self.user_options)
        return env


class Lab(SystemUserSpawner):
    """Members' own accounts and home directories."""

    def _user_id_default(self):
        return 4711

    def _group_id_default(self):
        return 4712


c.Lab.host_homedir_format_string = {homes!r} + "/{{username}}"
c.Lab.image_homedir_format_string = "/home/{{username}}"


class Images(DockerSpawner):
    pass


c.Images.allowed_images = {{"plain": {image!r}, "other": "lab/other:1"}}


class Callables(DockerSpawner):
    pass


async def host_config(spawner):
    await asyncio.sleep(0)
    return {{"dns_search": [spawner.user.name + ".lab"], "cpu_shares": 512, "oom_score_adj": 0}}


c.Callables.mem_limit = lambda spawner: "512M"
c.Callables.cpu_limit = lambda spawner: 1.5
c.Callables.extra_host_config = host_config
c.Callables.extra_create_kwargs = lambda spawner: {{"labels": {{"lab.member": spawner.user.name}}}}
c.Callables.environment = {{"TEAM": lambda spawner: spawner.user.name.upper()}}
c.Callables.name_template = "lab-{{username}}"
c.Callables.volumes = {{"lab-{{username}}": {{"bind": "/home/lab", "mode": "rw"}}}}
c.Callables.read_only_volumes = {{"lab-data": "/data"}}
c.Callables.post_start_cmd = "touch /tmp/after-the-start"


class Hooks(DockerSpawner):
    pass


def before(spawner):
    course = spawner.user_options["course"]
    spawner.environment = {{**spawner.environment, "COURSE": course}}
    spawner.volumes = {{f"course-{{course}}": "/course"}}
    spawner.docker("create_volume", f"course-{{course}}")  # nobody waits for it


c.Hooks.pre_spawn_hook = before


class Patient(DockerSpawner):
    pass


c.Patient.start_timeout = 30
c.Patient.http_timeout = 120
c.Patient.cmd = ["sh", "-c", "sleep 31; exec instant", "--"]


class Stacks(DockerSpawner):
    """docker-stacks: its start script begins as root, and members may use sudo."""


c.Stacks.extra_create_kwargs = {{"user": "root"}}
c.Stacks.environment = {{"GRANT_SUDO": "yes", "CHOWN_HOME": "yes"}}
c.Stacks.extra_host_config = {{
    "oom_score_adj": 0,
    "ulimits": [{{"name": n, "soft": 65536, "hard": 65536}} for n in ("memlock", "stack")],
}}

STYLES = (Form, Lab, Images, Callables, Hooks, Patient, Stacks)
GPU = {{s.__name__: type(f"GPU{{s.__name__}}", (GPUDockerSpawner, s), {{}}) for s in STYLES}}
c.GPUHooks.extra_options = ["course"]
c.GPUStacks.capabilities = None
c.GPUStacks.no_new_privileges = False
c.GPUStacks.pids_limit = 0
c.GPUStacks.memory_share = 0
c.GPUStacks.disk_limit = 0
c.GPUStacks.shm_size = 0
CLASSES = {{"plain" + style.__name__.lower(): style for style in STYLES}}
CLASSES |= {{"gpu" + name.lower(): cls for name, cls in GPU.items()}}


class OfMember(DockerSpawner):
    """Of each member the class that their name says."""

    def __new__(cls, *args, **kwargs):
        return CLASSES.get(kwargs["user"].name, GPUDockerSpawner)(*args, **kwargs)


c.JupyterHub.spawner_class = OfMember
c.GPUDockerSpawner.gpu_injection = "device_requests"
c.GPUDevices.source = {fleet!r}
c.GPUDatabase.url = "sqlite:///gpuspawner.sqlite"
import gpuspawner; gpuspawner.add_services(c, url="http://127.0.0.1:{port}")
'''

STYLES: dict[str, dict[str, Any]] = {
    "patient": {},
    "form": {"course": "ml", "week": 2},
    "lab": {},
    "images": {"image": "other"},
    "callables": {},
    "hooks": {"course": "stats"},
    "stacks": {},
}
"""What the members of each style ask for by REST."""

LEASED = ("GPUSPAWNER_", "NVIDIA_", "CUDA_")
TOKENS = {"JUPYTERHUB_API_TOKEN", "JPY_API_TOKEN"}


@pytest.fixture(scope="module")
def hub(hubs: None, engine: PrivateEngine, images: Any, folder: Path) -> Iterator[HubProcess]:
    """Every style's two members have their servers, some of them started at once."""
    engine.set_devices([device.uuid for device in open_source(FLEET).observe(utcnow()).devices])
    engine.client.tag(images.INSTANT, "lab/other", "1")
    config = CONFIG.format(
        image=images.INSTANT, homes=str(folder / "homes"), fleet=FLEET, port=free_port()
    )
    environment = {"DOCKER_HOST": engine.url}
    with HubProcess(folder / "hub", config, hub_ip=engine.gateway, environment=environment) as hub:

        def start(member: str) -> None:
            hub.spawn_and_wait(member, STYLES[member.removeprefix("plain").removeprefix("gpu")])

        members = [kind + style for style in STYLES for kind in ("plain", "gpu")]
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(start, members))
        yield hub
    engine.clean()
    engine.client.remove_image("lab/other:1", force=True)


def inspected(engine: PrivateEngine, member: str) -> dict[str, Any]:
    """What the engine says of the member's container, with names that tell nobody apart."""
    (found,) = (
        container
        for container in engine.client.containers(all=True)
        if container["Names"][0].endswith(f"-{member}")
    )
    text = json.dumps(engine.client.inspect_container(found["Id"]))
    for name in (member, member.upper()):
        text = text.replace(name, "MEMBER")
    container: dict[str, Any] = json.loads(text)
    return container


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


def variables(container: dict[str, Any]) -> dict[str, str]:
    return dict(item.split("=", 1) for item in container["Config"]["Env"])


@pytest.mark.parametrize("style", STYLES)
def test_container_changes_match_the_documentation(
    hub: HubProcess, engine: PrivateEngine, style: str
) -> None:
    plain, ours = (inspected(engine, kind + style) for kind in ("plain", "gpu"))
    assert ours["HostConfig"]["DeviceRequests"] and not plain["HostConfig"]["DeviceRequests"]
    differs = {
        f"{part}.{key}"
        for part in ("Config", "HostConfig")
        for key in changed(plain[part], ours[part]) - {"Hostname"}  # the container's own id
    }
    rows = [row for row in container_rows() if row.always or style != "stacks"]
    assert differs <= {key for row in rows for key in row.keys} - {"HostConfig.Binds"}
    new = changed(variables(plain), variables(ours)) - TOKENS
    assert all(name.startswith(LEASED) for name in new), new
    assert plain["Config"]["Labels"].items() <= ours["Config"]["Labels"].items()


def test_each_configuration_style_keeps_its_effect(hub: HubProcess, engine: PrivateEngine) -> None:
    containers = {style: inspected(engine, f"gpu{style}") for style in STYLES}
    assert variables(containers["form"])["COURSE"] == "ml 2"
    assert containers["lab"]["Config"]["User"] == "4711:4712"
    assert variables(containers["lab"])["NB_UID"] == "4711"
    assert containers["lab"]["HostConfig"]["Binds"][0].endswith("homes/MEMBER:/home/MEMBER:rw")
    assert containers["images"]["Config"]["Image"] == "lab/other:1"
    host = containers["callables"]["HostConfig"]
    assert (host["Memory"], host["CpuQuota"], host["CpuShares"]) == (512 * 2**20, 150_000, 512)
    assert host["DnsSearch"] == ["MEMBER.lab"] and host["OomScoreAdj"] == 0
    assert variables(containers["callables"])["TEAM"] == "MEMBER"
    assert containers["callables"]["Config"]["Labels"]["lab.member"] == "MEMBER"
    assert variables(containers["hooks"])["COURSE"] == "stats"
    assert containers["hooks"]["HostConfig"]["Binds"] == ["course-stats:/course:rw"]
    for style, expected in (("stacks", "0"), ("form", "1")):
        look = ["grep", "NoNewPrivs", "/proc/1/status"]
        assert engine.execute(containers[style]["Id"], look)[1].split() == ["NoNewPrivs:", expected]
    look = ["ls", "/tmp/after-the-start", "/data", "/home/lab"]
    assert engine.execute(containers["callables"]["Id"], look)[0] == 0


def test_unknown_form_fields_are_rejected(hub: HubProcess) -> None:
    hub.stop_server("gpucallables")
    answer = hub.spawn("gpucallables", {"course": "ml"})
    assert answer.status_code == 400 and "An admin of this hub can allow" in message_of(answer)
    assert "c.GPUSpawnerMixin.extra_options" in hub.log_text()


def test_link_prefills_custom_form_fields(
    hub: HubProcess, engine: PrivateEngine, browser: Browser
) -> None:
    """By a link of a course, in the browser of a member who then presses Start."""
    hub.stop_server("gpuform")
    page = browser.new_page()
    page.goto(f"{hub.url}/hub/spawn?course=stats&opt-week=7&opt-course=stats&opt-extras=slides")
    page.get_by_label("Username").fill("gpuform")
    page.get_by_label("Password", exact=False).first.fill(USER_PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    note = page.locator("#gpuspawner-own-fields")
    expect(note).to_contain_text("course: stats")
    expect(note).to_contain_text("Review and start.")
    expect(page.get_by_label("Course")).to_have_value("stats")
    expect(page.locator("[name=extras]")).to_be_checked()
    page.get_by_role("button", name="Start").click()
    wait_for(lambda: hub.server("gpuform"), "the server")
    hub.wait_server("gpuform")
    assert variables(inspected(engine, "gpuform"))["COURSE"] == "stats 7"


def test_link_cannot_preselect_another_image(hub: HubProcess) -> None:
    """As a browser without scripts shows it."""
    hub.stop_server("gpuimages")
    member = hub.login("gpuimages")
    page = member.get(f"{hub.url}/hub/spawn?image=plain&utm_source=mail", headers=NAVIGATION)
    assert "<strong>image: plain</strong>" in page.text
    assert "Choose image above." in page.text
    assert "utm_source" not in page.text.partition("gpuspawner-own-fields")[2][:2000]
    assert hub.server("gpuimages") is None, "a link starts nothing"
