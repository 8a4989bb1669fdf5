"""Three lines into a DockerSpawner hub, and out again. Real: hub, proxy, engine, device requests.

The GPUs are the stand-in library's, so that nothing but the three lines says what there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dockerspawner import DockerSpawner

from gpuspawner.leases.models import Lease, LeaseState
from tests.support import images
from tests.support.brokers import services_on
from tests.support.engine import PrivateEngine
from tests.support.hub import USER_PASSWORD, HubProcess
from tests.support.nvml import nvml_library
from tests.support.processes import free_port
from tests.support.visitor import Visitor, text_of

CLUB = """
c.JupyterHub.cleanup_servers = False
c.JupyterHub.spawner_class = "docker"
c.DockerSpawner.image = {image!r}
c.DockerSpawner.name_template = "{{prefix}}-of-{{username}}"
c.DockerSpawner.prefix = "club"
c.DockerSpawner.volumes = {{"jupyterhub-user-{{username}}": "/home/jovyan/work"}}
c.DockerSpawner.read_only_volumes = {{"club-data": "/data"}}
c.DockerSpawner.notebook_dir = "/home/jovyan"
c.DockerSpawner.mem_limit = lambda spawner: "1G" if spawner.user.name == "ada" else "512M"
c.DockerSpawner.extra_create_kwargs = {{
    "hostname": "lab-{{username}}", "labels": {{"club.member": "{{username}}"}},
}}
c.DockerSpawner.post_start_cmd = "touch /tmp/after-the-start"
c.Spawner.default_url = "/tree"
c.Spawner.http_timeout = 60


def host_config(spawner):
    search = [f"{{spawner.user.name}}.club"]
    return {{"pids_limit": 300, "cap_drop": ["NET_RAW"], "dns_search": search}}


c.DockerSpawner.extra_host_config = host_config
c.Spawner.environment = {{
    "CLUB": "rowing",
    "COURSE": lambda spawner: spawner.user_options.get("course", "none"),
}}
c.Spawner.options_form = '<select name="course"><option>ml</option><option>stats</option></select>'


def from_form(form):
    return {{"course": form["course"][0]}}


def note(what):
    def hook(spawner):
        with open("hooks", "a") as file:
            print(what, spawner.user.name, spawner.user_options, file=file)

    return hook


c.Spawner.options_from_form = from_form
c.Spawner.pre_spawn_hook = note("before")
c.Spawner.post_stop_hook = note("after")
"""
"""What an admin has today: callables, templates, hooks, a form, and containers that are kept."""

THREE_LINES = """
c.JupyterHub.spawner_class = "gpu-docker"
c.GPUDatabase.url = "sqlite:///gpuspawner.sqlite"
import gpuspawner; gpuspawner.add_services(c{port})
"""

READS_FORM = "options_from_form" in DockerSpawner.class_trait_names()
"""Not DockerSpawner 13: a method of its own hides the setting."""

OURS = {"DeviceRequests", "ShmSize", "Ulimits", "MemorySwap", "SecurityOpt", "OomScoreAdj"}
"""All that may be other than it was in what the engine is told of a container."""

LOOK = """
ls /dev/nvidia[0-9]* 2>/dev/null; echo --
ls /home/jovyan/work; echo --
cat /home/jovyan/notes.txt; echo --
ls /tmp/after-the-start; echo --
tr '\\0' '\\n' </proc/1/environ
"""
NOTE = """
echo in the container >/home/jovyan/notes.txt
echo in the volume >/home/jovyan/work/volume.txt
"""


class Club:
    """The club's hub, with and without the three lines."""

    def __init__(self, folder: Path, engine: PrivateEngine, image: str) -> None:
        self.engine = engine
        self.gpus = nvml_library.gpus(2)
        engine.set_devices([gpu.uuid for gpu in self.gpus], model=self.gpus[0].name)
        library = nvml_library.build_nvml_library(folder / "nvml")
        nvml_library.write_fleet(folder / "fleet", self.gpus)
        self.today = CLUB.format(image=image)
        # One port for the service: the default may be somebody else's on a machine of tests.
        self.lines = THREE_LINES.format(port=f', url="http://127.0.0.1:{free_port()}"')
        self.hub = HubProcess(
            folder / "hub",
            self.today,
            hub_ip=engine.gateway,
            environment={
                "DOCKER_HOST": engine.url,
                **nvml_library.environment(library, folder / "fleet"),
            },
        )

    def change(self, config: str) -> None:
        """Edit jupyterhub_config.py and restart the hub, as an admin does."""
        self.hub.config = config
        self.hub.restart()

    def visitor(self, name: str) -> Visitor:
        return Visitor(self.hub.url, name, USER_PASSWORD)

    def container(self, user: str) -> dict[str, Any]:
        """The container as the engine describes it, by the name that the club gave it."""
        found: dict[str, Any] = self.engine.client.inspect_container(f"club-of-{user}")
        return found

    def shell(self, user: str, command: str) -> str:
        """What a command says that is run in the member's container."""
        container = self.container(user)["Id"]
        return self.engine.execute(container, ["sh", "-c", command])[1]

    def look(self, user: str) -> dict[str, Any]:
        """What the server sees: devices, its files, what its hook left, its environment."""
        devices, work, notes, hook, lines = self.shell(user, LOOK).split("--\n")
        return {
            "devices": devices.split(),
            "work": work.split(),
            "notes": notes.strip(),
            "hook": hook.strip() == "/tmp/after-the-start",
            "env": dict(line.split("=", 1) for line in lines.splitlines() if "=" in line),
        }

    def hooks(self) -> list[str]:
        return (self.hub.folder / "hooks").read_text().splitlines()

    def leases(self, user: str) -> list[Lease]:
        with services_on(f"sqlite:///{self.hub.folder}/gpuspawner.sqlite") as services:
            return services.leases.of_account(f"member:{user}")


@pytest.fixture
def club(hubs: None, tmp_path: Path, clean_engine: PrivateEngine) -> Iterator[Club]:
    club = Club(tmp_path, clean_engine, images.INSTANT)
    with club.hub:
        yield club


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    return dict(item.split("=", 1) for item in container["Config"]["Env"])


def test_gpuspawner_can_be_added_and_removed_cleanly(club: Club) -> None:
    # Today.
    ada, bob = club.visitor("ada"), club.visitor("bob")
    ada.spawn({"course": "ml"})
    club.shell("ada", NOTE)
    before, saw = club.container("ada"), club.look("ada")
    assert saw["devices"] == [] and saw["hook"]
    assert saw["env"]["COURSE"] == ("ml" if READS_FORM else "none")
    ada.stop()
    bob.spawn({"course": "stats"})  # runs on, through everything that follows
    bobs = club.container("bob")["Id"]

    # Three lines more.
    club.change(club.today + club.lines)
    assert "CLUB=rowing" in bob.session.get(f"{bob.url}/user/bob/env", timeout=60).text
    form = text_of(ada.get("/hub/spawn"))
    assert "ml stats" in form and "2 of 2 GPUs free" in form
    ada.spawn({"course": "stats", "gpus": "1"})

    after, saw = club.container("ada"), club.look("ada")
    (lease,) = club.leases("ada")
    assert lease.state is LeaseState.RUNNING and lease.engine_ref == after["Id"]
    assert saw["env"]["NVIDIA_VISIBLE_DEVICES"] == lease.uuids[0]
    assert saw["env"]["GPUSPAWNER_LEASE_ID"] == lease.id
    assert saw["devices"] == [f"/dev/nvidia{lease.devices[0].index}"]
    assert saw["env"]["COURSE"] == ("stats" if READS_FORM else "none")
    assert saw["env"]["CLUB"] == "rowing" and saw["hook"]
    assert saw["work"] == ["volume.txt"] and saw["notes"] == "in the container"
    assert changed(before["HostConfig"], after["HostConfig"]) <= OURS
    assert after["HostConfig"]["Memory"] == 2**30
    assert after["HostConfig"]["DnsSearch"] == ["ada.club"]
    assert changed(before["Config"], after["Config"]) <= {"Env", "Labels", "Image"}
    assert before["Config"]["Labels"].items() <= after["Config"]["Labels"].items()
    new = changed(environment_of(before), environment_of(after))
    theirs = {name for name in new if not name.startswith(("GPUSPAWNER_", "NVIDIA_", "CUDA_"))}
    assert theirs <= {"COURSE", "JUPYTERHUB_API_TOKEN", "JPY_API_TOKEN", "JUPYTER_IMAGE_SPEC"}
    ada.stop()
    (lease,) = club.leases("ada")
    assert lease.state is LeaseState.ENDED and lease.charged > 0
    bob.stop()  # started by the stock spawner, stopped by ours
    assert club.leases("bob") == []

    # The three lines taken out.
    club.change(club.today)
    ada.spawn({"course": "ml"})
    last, saw = club.container("ada"), club.look("ada")
    assert saw["devices"] == [], "nobody leases GPUs, so nobody may see one"
    assert saw["work"] == ["volume.txt"] and saw["notes"] == "in the container"
    assert changed(before["HostConfig"], last["HostConfig"]) <= OURS
    ada.stop()
    bob.spawn({"course": "stats"})
    assert club.container("bob")["Id"] == bobs  # never was ours: the very same container
    bob.stop()

    assert [line.split(" {")[0] for line in club.hooks()] == [
        *("before ada", "after ada", "before bob"),
        *("before ada", "after ada", "after bob"),
        *("before ada", "after ada", "before bob", "after bob"),
    ]
    assert ("'course': 'stats'" in club.hooks()[3]) == READS_FORM
