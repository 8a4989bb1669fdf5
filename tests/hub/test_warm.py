"""Servers that were started before their member asked. Real: JupyterHub, its proxy, a Docker Engine
whose machine's mounts propagate, images/base with JupyterLab, kernels. GPUs are simulated, and
reach containers by real device requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpuspawner.engines.warm import LABEL_WARM, NAME, WAITING
from tests.support import images as image_files
from tests.support.deadly import DEADLY
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub
from tests.support.processes import signal_pid, wait_for

CATALOG = f"""
environments:
  - slug: lab
    display_name: JupyterLab
    description: JupyterLab with a GPU.
    image: {image_files.BASE}
    default: true
    devices: {{default: 1, max: 2}}
  - slug: other
    display_name: Something else
    description: A server that answers at once.
    image: {image_files.INSTANT}
    devices: {{default: 1, max: 2}}
"""
CONFIG = """
import gpuspawner.spawners.warm as quick
quick.CALM, quick.EVERY = 1.0, 0.5
c.GPUDockerSpawner.warm = True
c.GPUDockerSpawner.warm_folder = {folder!r}
c.GPUDockerSpawner.workspace = "work-{{username}}"
c.Spawner.http_timeout = c.Spawner.start_timeout = 240
c.Spawner.poll_interval = 5
c.Spawner.environment = {{"COURSE": "physics", "PYTHONHASHSEED": "7"}}
"""
SLOW = 240.0
WORK = "/home/jovyan/work"


@pytest.fixture(scope="module")
def engine() -> Iterator[PrivateEngine]:
    with PrivateEngine(propagation="shared") as started:
        image_files.ensure_images(started, [image_files.BASE, image_files.INSTANT])
        yield started


@pytest.fixture
def start_hub(engine: PrivateEngine, tmp_path: Path) -> Iterator[Callable[..., GPUHub]]:
    begun: list[GPUHub] = []

    def start(more: str = "", fleet: str = "2xT4") -> GPUHub:
        text = CONFIG.format(folder=str(tmp_path / "warm")) + more
        hub = GPUHub(tmp_path / "hub", engine, text, fleet=fleet, catalog=CATALOG)
        hub.start()
        begun.append(hub)
        return hub

    engine.clean()
    yield start
    for hub in begun:
        hub.stop()
    engine.clean()


class Scene:
    """What a test sees of a hub's containers."""

    def __init__(self, hub: GPUHub) -> None:
        self.hub = hub
        self.docker = hub.engine.client
        self.folder = hub.folder.parent / "warm"

    def waiting(self) -> list[dict[str, Any]]:
        """The containers that wait now, ready to be given."""
        found = self.docker.containers(filters={"name": f"^/{NAME}"})
        return [c for c in found if WAITING in self.docker.logs(c["Id"]).decode()]

    def wait_for_waiting(self, many: int) -> list[dict[str, Any]]:
        def enough() -> list[dict[str, Any]]:
            found = self.waiting()
            return found if len(found) == many else []

        return wait_for(enough, f"{many} containers that wait", timeout=SLOW, interval=0.5)

    def learn(self, user: str = "member1", waiting: int = 2) -> list[dict[str, Any]]:
        """Start once, which shows how, and stop; the containers that wait then."""
        assert self.hub.spawn(user, {"environment": "lab"}).ok
        self.hub.wait_server(user, timeout=SLOW)
        self.hub.stop_server(user)
        return self.wait_for_waiting(waiting)

    def begin(self, user: str, **options: Any) -> dict[str, Any]:
        """Start a server; its container."""
        assert self.hub.spawn(user, {"environment": "lab", **options}).ok
        self.hub.wait_server(user, timeout=SLOW)
        container: dict[str, Any] = self.docker.inspect_container(f"jupyter-{user}")
        return container

    def shell(self, user: str, command: str) -> str:
        made = self.docker.exec_create(f"jupyter-{user}", ["sh", "-c", command])
        return str(self.docker.exec_start(made["Id"]).decode())

    def mounter(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.docker.containers(
            filters={"label": "gpuspawner.mounter"}
        )
        return found

    def mounts(self) -> list[str]:
        """What is mounted in the hub's folder, on the engine's machine."""
        lines = Path(f"/proc/{self.hub.engine.pid}/mountinfo").read_text().splitlines()
        return [line for line in lines if str(self.folder) in line.split()[4]]

    def places(self) -> list[Path]:
        return sorted(self.folder.iterdir()) if self.folder.exists() else []


def variables_of(text: str) -> dict[str, str]:
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)


def test_who_asks_gets_what_waited_and_it_is_theirs_alone(
    start_hub: Callable[..., GPUHub],
) -> None:
    hub = start_hub()
    scene = Scene(hub)
    first = scene.begin("member1")
    scene.shell("member1", f"echo mine > {WORK}/notes.txt")
    assert LABEL_WARM not in first["Config"]["Labels"], "nothing waited before anybody asked"
    (ahead,) = scene.wait_for_waiting(1)
    inspected = scene.docker.inspect_container(ahead["Id"])

    # It knows nobody, and nobody pays for it.
    assert "member1" not in json.dumps(inspected)
    inside = variables_of(_environ(scene, ahead["Id"]))
    assert not [n for n in inside if n.startswith(("JUPYTERHUB_", "JPY_", "GPUSPAWNER_LEASE"))]
    assert inside["COURSE"] == "physics"
    assert not _listening(scene, ahead["Id"]), "it listens before it is anybody's"
    assert len(hub.open_leases()) == 1
    free = set(hub.devices) - {place.uuid for place in hub.taken()}
    assert set(inspected["HostConfig"]["DeviceRequests"][0]["DeviceIDs"]) == free

    # The second member's server is that very container.
    given = scene.begin("member2")
    assert given["Id"] == ahead["Id"]
    (lease,) = hub.open_leases("member2")
    assert set(lease.uuids) == free and lease.engine_ref == given["Id"]
    assert "JUPYTERHUB_API_TOKEN" not in json.dumps(given), "its token is for all to inspect"
    assert scene.shell("member2", f"ls {WORK}") == ""
    scene.shell("member2", f"echo hers > {WORK}/own.txt")
    code = (
        "import os, json; names = ('JUPYTERHUB_USER', 'GPUSPAWNER_LEASE_ID', 'COURSE',"
        " 'NVIDIA_VISIBLE_DEVICES', 'GPUSPAWNER_WARM', 'PYTHONHASHSEED');"
        f" open('{WORK}/kernel.txt', 'w').write('x');"
        " print(json.dumps([os.getcwd(), {n: os.environ.get(n) for n in names}]))"
    )
    folder, seen = json.loads(hub.kernel_run("member2", code, timeout=SLOW))
    assert folder == WORK and seen == {
        "JUPYTERHUB_USER": "member2",
        "GPUSPAWNER_LEASE_ID": lease.id,
        "COURSE": "physics",
        "NVIDIA_VISIBLE_DEVICES": lease.uuids[0],
        "GPUSPAWNER_WARM": None,
        "PYTHONHASHSEED": "7",
    }
    assert "The kernel was ready" in scene.docker.logs(given["Id"]).decode()
    assert scene.shell("member2", "ls /dev | grep -c 'nvidia[0-9]'") == "1\n"
    whoami = hub.terminal_run("member2", "echo $JUPYTERHUB_USER; pwd")
    assert "member2" in whoami and WORK in whoami
    assert scene.shell("member1", f"ls {WORK}").split() == ["notes.txt"]

    # What is left afterwards is the workspace.
    hub.stop_server("member2")
    wait_for(lambda: not scene.mounts(), "the mount to go", timeout=SLOW)
    scene.wait_for_waiting(1)
    wait_for(lambda: len(scene.places()) == 1, "its folder to go", timeout=SLOW)
    again = scene.begin("member2")
    assert LABEL_WARM in again["Config"]["Labels"]
    assert scene.shell("member2", f"ls {WORK}").split() == ["kernel.txt", "own.txt"]


def _environ(scene: Scene, container: str) -> str:
    pid = _server_pid(scene, container)
    return Path(f"/proc/{pid}/environ").read_text()


def _server_pid(scene: Scene, container: str) -> int:
    init = psutil.Process(scene.docker.inspect_container(container)["State"]["Pid"])
    return init.children()[0].pid


def _listening(scene: Scene, container: str) -> str:
    made = scene.docker.exec_create(container, ["cat", "/proc/net/tcp", "/proc/net/tcp6"])
    lines = scene.docker.exec_start(made["Id"]).decode().splitlines()
    return "\n".join(line for line in lines if " 0A " in line)


def test_another_wish_ends_what_waits_before_it_begins(start_hub: Callable[..., GPUHub]) -> None:
    hub = start_hub()
    scene = Scene(hub)
    scene.learn()
    # Another environment, on one of two devices.
    assert scene.begin("member2", environment="other")["Config"]["Image"] == image_files.INSTANT
    (leased,) = {place.uuid for place in hub.taken()}
    for container in scene.docker.containers(all=True, filters={"label": LABEL_WARM}):
        requests = scene.docker.inspect_container(container["Id"])["HostConfig"]["DeviceRequests"]
        assert leased not in requests[0]["DeviceIDs"], "two containers have one device"
    hub.stop_server("member2")
    scene.wait_for_waiting(2)
    # Both devices for one server.
    both = scene.begin("member2", gpus=2)
    assert LABEL_WARM not in both["Config"]["Labels"]
    assert not scene.docker.containers(all=True, filters={"label": LABEL_WARM})
    assert "several GPUs" in hub.log_text()


def test_a_member_whose_container_is_particular_gets_their_own(
    start_hub: Callable[..., GPUHub],
) -> None:
    hub = start_hub("""
async def particular(spawner):
    if spawner.user.name == "member2":
        spawner.environment = {**spawner.environment, "COURSE": "chemistry"}
    if spawner.user.name == "member3":
        spawner.extra_host_config = {"extra_hosts": {"member3.lab": "10.0.0.1"}}
c.Spawner.pre_spawn_hook = particular
""")
    scene = Scene(hub)
    scene.learn()
    second = scene.begin("member2")
    assert LABEL_WARM not in second["Config"]["Labels"]
    assert "COURSE=chemistry" in second["Config"]["Env"]
    hub.stop_server("member2")
    third = scene.begin("member3")
    assert LABEL_WARM not in third["Config"]["Labels"]
    assert third["HostConfig"]["ExtraHosts"] == ["member3.lab:10.0.0.1"]
    assert "ExtraHosts names the member" in hub.log_text()


def test_a_hub_that_is_killed_takes_along_what_waits_and_nothing_else(
    start_hub: Callable[..., GPUHub],
) -> None:
    hub = start_hub()
    scene = Scene(hub)
    scene.learn()
    given = scene.begin("member1")
    scene.shell("member1", f"echo mine > {WORK}/notes.txt")
    scene.wait_for_waiting(1)
    hub.kill9()
    wait_for(lambda: not scene.waiting(), "what waits to end with the hub", timeout=60)
    wait_for(lambda: not scene.mounter(), "the mounter to end with the hub", timeout=60)
    assert scene.docker.inspect_container("jupyter-member1")["State"]["Running"]
    hub.start()
    hub.wait_server("member1")
    (lease,) = hub.open_leases()
    assert lease.engine_ref == given["Id"]
    assert hub.kernel_run("member1", "print(open('notes.txt').read())", timeout=SLOW) == "mine\n\n"
    hub.stop_server("member1")
    assert not hub.open_leases()
    # The next start teaches this hub, which clears away what is left of the last one.
    scene.learn()
    wait_for(lambda: len(scene.places()) == 2 and not scene.mounts(), "order", timeout=SLOW)
    left = scene.docker.containers(all=True, filters={"label": LABEL_WARM})
    assert {c["State"] for c in left} == {"running"} and len(left) == 2
    scene.begin("member1")
    assert scene.shell("member1", f"ls {WORK}").split() == ["notes.txt"]


@pytest.mark.parametrize("step", ["noted", "renamed", "mounted", "told"])
def test_a_hub_that_is_killed_while_it_gives_leaves_a_whole_server_or_none(
    start_hub: Callable[..., GPUHub], tmp_path: Path, step: str
) -> None:
    armed = tmp_path / "armed"
    hub = start_hub(DEADLY.replace("ARMED", repr(str(armed))), fleet="1xT4")
    scene = Scene(hub)
    scene.learn(waiting=1)
    armed.write_text(step)
    with ThreadPoolExecutor(1) as beside:
        beside.submit(hub.spawn, "member2", {"environment": "lab"})
        wait_for(lambda: not armed.exists(), f"the hub to come to: {step}", timeout=60)
    died = psutil.Process(hub.pid).status
    wait_for(lambda: died() == psutil.STATUS_ZOMBIE, "the hub to be dead")
    hub.kill9()
    assert hub.open_leases("member2"), "it was on disk before anything was given"
    hub.start()
    if step == "told":  # a server that has its orders comes up without a hub, which finds it
        hub.wait_server("member2", timeout=SLOW)
        (lease,) = hub.open_leases("member2")
        code = "import os; print(os.environ['GPUSPAWNER_LEASE_ID'])"
        assert lease.id in hub.kernel_run("member2", code, timeout=SLOW)
        hub.stop_server("member2")

    def settled() -> bool:
        leased = [c for c in scene.docker.containers() if c["Names"][0].startswith("/jupyter-")]
        return not (hub.server("member2") or hub.open_leases() or leased)

    wait_for(settled, "its lease and its server to end", timeout=SLOW)
    assert LABEL_WARM in scene.learn(waiting=1)[0]["Labels"]
    scene.begin("member2")


def test_whatever_fails_at_the_grant_the_member_gets_a_server(
    start_hub: Callable[..., GPUHub], engine: PrivateEngine
) -> None:
    hub = start_hub(fleet="1xT4")
    scene = Scene(hub)
    (ahead,) = scene.learn(waiting=1)

    # It was removed behind the hub's back.
    scene.docker.remove_container(ahead["Id"], force=True)
    scene.begin("member1")
    hub.stop_server("member1")

    # It hangs.
    (ahead,) = scene.wait_for_waiting(1)
    signal_pid(_server_pid(scene, ahead["Id"]), 19)
    begun = scene.begin("member1")
    assert begun["Id"] != ahead["Id"] and LABEL_WARM not in begun["Config"]["Labels"]
    assert "could not be used" in hub.log_text()
    assert not [c for c in scene.docker.containers(all=True) if c["Id"] == ahead["Id"]]
    hub.stop_server("member1")
    wait_for(lambda: not scene.mounts(), "its mount to go", timeout=SLOW)


def test_nobody_who_mounts_and_an_image_that_is_another_by_now(
    start_hub: Callable[..., GPUHub], engine: PrivateEngine
) -> None:
    hub = start_hub(fleet="1xT4")
    scene = Scene(hub)
    scene.learn(waiting=1)
    # Whoever mounts was killed: another one does.
    scene.docker.kill(scene.mounter()[0]["Id"])
    given = scene.begin("member1")
    assert LABEL_WARM in given["Config"]["Labels"] and len(scene.mounter()) == 1
    hub.stop_server("member1")
    scene.wait_for_waiting(1)
    # The tag is another image's: nobody gets the old one, and the next one waits.
    old = scene.docker.inspect_image(image_files.BASE)["Id"]
    made = scene.docker.create_container(image_files.BASE)["Id"]
    repository, _, tag = image_files.BASE.partition(":")
    try:
        scene.docker.commit(made, repository=repository, tag=tag)
        new = scene.docker.inspect_image(image_files.BASE)["Id"]
        assert scene.begin("member1")["Image"] == new != old
        hub.stop_server("member1")
        (ahead,) = scene.wait_for_waiting(1)
        assert ahead["ImageID"] == new
    finally:
        scene.docker.tag(old, repository, tag=tag, force=True)


def test_a_server_that_is_started_again_by_hand_says_so_and_ends(
    start_hub: Callable[..., GPUHub],
) -> None:
    hub = start_hub(fleet="1xT4")
    scene = Scene(hub)
    scene.learn(waiting=1)
    given = scene.begin("member1")
    scene.shell("member1", f"echo mine > {WORK}/notes.txt")
    scene.docker.restart(given["Id"])
    wait_for(lambda: hub.server("member1") is None, "the hub to see it end", timeout=SLOW)
    wait_for(lambda: not hub.open_leases(), "its lease to end", timeout=SLOW)
    assert LABEL_WARM in scene.learn(waiting=1)[0]["Labels"]
    scene.begin("member1")
    assert scene.shell("member1", f"ls {WORK}").split() == ["notes.txt"]


def test_where_mounts_do_not_propagate_all_starts_as_ever_and_the_log_says_why(
    tmp_path: Path,
) -> None:
    with PrivateEngine(propagation="private") as plain:
        image_files.ensure_images(plain, [image_files.BASE, image_files.INSTANT])
        config = CONFIG.format(folder=str(tmp_path / "warm"))
        with GPUHub(tmp_path / "hub", plain, config, fleet="2xT4", catalog=CATALOG) as hub:
            scene = Scene(hub)
            scene.begin("member1")
            told = "mount --make-rshared /"
            wait_for(lambda: told in hub.log_text(), "the log to say why", timeout=SLOW)
            assert LABEL_WARM not in scene.begin("member2")["Config"]["Labels"]
