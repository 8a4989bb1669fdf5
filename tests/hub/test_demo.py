"""`make demo`'s script as a newcomer runs it. Real: all of it, once with a Docker Engine too."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpuspawner.core.units import MICRO, format_credits
from gpuspawner.leases.models import Lease, LeaseState
from gpuspawner.services import Services
from tests.support import images, steps
from tests.support.brokers import services_on
from tests.support.doc_blocks import blocks_in
from tests.support.engine import PrivateEngine
from tests.support.nvml import nvml_library
from tests.support.preloaded import PRELOADED
from tests.support.processes import LIVE, PATIENCE, REPO, alive, command_of, free_port, wait_for
from tests.support.visitor import Visitor, text_of

pytestmark = pytest.mark.usefixtures("processes")

SCRIPT = REPO / "scripts" / "demo.py"
NO_ENGINE = {"DOCKER_HOST": "unix:///nowhere/docker.sock"}
OPENING_GRANT = 100 * MICRO
PRESENT = 25 * MICRO
"""What the tutorial gives member1."""
LOOK = """
import glob, json, os
open("notes.txt", "a").write("one more run\\n")
places = (place + "/datasets/sample" for place in ("", os.path.expanduser("~")))
sample = next(place for place in places if os.path.isdir(place))
print(json.dumps({
    "env": dict(os.environ),
    "cwd": os.getcwd(),
    "gpus": glob.glob("/dev/nvidia?"),
    "notes": open("notes.txt").read(),
    "sample": open(sample + "/iris.csv").read(),
    "sample is read-only": bool(os.statvfs(sample).f_flag & os.ST_RDONLY),
}))
"""
"""What a member does in a notebook of their server."""

DECIDE = """
import demo
ours = demo.Demo()
ours.state.open()
ours.internal["HUB_PORT"] = str(demo._free_ports(1)[0])
ours._find_gpus()
ours._find_docker()
raise SystemExit(1)
"""
"""How the demo decides where servers run, and what it says of that, without the rest of it."""


class DemoProcess:
    """``scripts/demo.py`` as a process, with a folder of its own."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.name = "demo"
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = dict(environment)
        self.output = folder.parent / f"{folder.name}.output"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait for its word that it is ready."""
        self.launch()
        wait_for(self._ready, "the demo", timeout=170)

    def launch(self) -> None:
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT)],
                cwd=self.folder.parent,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if self not in LIVE:
            LIVE.append(self)

    def refusal(self, program: str = "import demo, sys; sys.exit(demo.main())") -> str:
        """Run it where it cannot go on, with its imports behind it: what it says at its end."""
        program = f"import sys; sys.path[0] = {str(SCRIPT.parent)!r}\n{program}"
        streams = [os.devnull, str(self.output), str(self.output)]
        self.output.unlink(missing_ok=True)
        ended = PRELOADED.start(["-c", program], self.folder.parent, self._environment(), streams)
        assert ended.wait(timeout=60 * PATIENCE) == 1
        return self.said()

    def interrupt(self, number: int = signal.SIGINT) -> int:
        """What Ctrl-C does; the exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout=60 * PATIENCE)

    def close(self) -> None:
        """Whatever a failed test left running ends now."""
        if self in LIVE:
            LIVE.remove(self)
        if self.process is None or self.process.poll() is not None:
            return
        left = self.below()
        self.process.terminate()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def below(self) -> list[psutil.Process]:
        """The processes that came out of the demo, while it runs."""
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def said(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def log_text(self) -> str:
        log = self.folder / "hub.log"
        return self.said() + (log.read_text(errors="replace") if log.exists() else "")

    def password(self) -> str:
        """That of members, as the demo prints it."""
        found = re.search(r"as a member .*password +(.+)", self.said())
        assert found, self.said()
        return found[1]

    def services(self) -> contextlib.AbstractContextManager[Services]:
        return services_on(f"sqlite:///{self.folder}/gpuspawner.sqlite")

    def leases(self) -> list[Lease]:
        with self.services() as services:
            return services.leases.of_account("member:member1")

    def balance(self) -> int:
        with self.services() as services:
            return services.ledger.member("member1").balance

    def _environment(self) -> dict[str, str]:
        others = {k: v for k, v in os.environ.items() if not k.startswith("GPUSPAWNER_DEMO")}
        own = {"GPUSPAWNER_DEMO_DIR": str(self.folder), "GPUSPAWNER_DEMO_PORT": str(self.port)}
        return others | own | self.environment

    def _ready(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"the demo ended with {self.process.returncode}:\n{self.said()}")
        return "Ctrl-C ends the demo" in self.said()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[DemoProcess]:
    """A demo on a machine without Docker."""
    demo = DemoProcess(tmp_path / "demo", NO_ENGINE)
    yield demo
    demo.close()


@pytest.fixture
def docker(tmp_path: Path, clean_engine: PrivateEngine) -> Iterator[DemoProcess]:
    """A demo on a machine with Docker."""
    environment = {"DOCKER_HOST": clean_engine.url, "GPUSPAWNER_DEMO_IMAGE": images.BASE}
    demo = DemoProcess(tmp_path / "demo", environment)
    yield demo
    demo.close()


def use_gpus(demo: DemoProcess, free: int, **fields: str) -> dict[str, Any]:
    """A member's way: sign in, choose, spawn, look around, write a file."""
    member = Visitor(demo.url, "member1", demo.password())
    form = text_of(member.get("/hub/spawn"))
    assert f"{free} of {free} GPUs free" in form
    assert f"Your balance: {format_credits(demo.balance())} credits" in form

    asked_at = datetime.now(timezone.utc)
    member.spawn(fields)
    ready_at = datetime.now(timezone.utc)
    seen: dict[str, Any] = json.loads(member.run(LOOK))
    left = free - int(fields.get("gpus", "1"))
    other = Visitor(demo.url, "member2", demo.password())
    assert f"{left} of {free} GPUs free" in text_of(other.get("/hub/spawn"))
    files = member.files()
    return seen | {"files": files, "asked_at": asked_at, "ready_at": ready_at}


def check_end(demo: DemoProcess, before: int, seen: Mapping[str, Any], number: int) -> None:
    """Ended by a signal, nothing is left, and the balance is down by rate x time, no more."""
    processes = demo.below()
    stopping_at = datetime.now(timezone.utc)
    assert demo.interrupt(number) == 0
    stopped_at = datetime.now(timezone.utc)
    check_nothing_runs(demo, processes)
    lease = demo.leases()[0]
    assert lease.state is LeaseState.ENDED and lease.started_at and lease.ended_at
    lasted = lease.ended_at - lease.started_at
    charged = before - demo.balance()
    assert charged == lease.charged == int(lease.rate * lasted.total_seconds()) // 3600
    assert seen["asked_at"] < lease.started_at < seen["ready_at"]
    assert stopping_at < lease.ended_at < stopped_at


def check_environment(demo: DemoProcess, seen: Mapping[str, Any]) -> None:
    lease = demo.leases()[0]
    environment = seen["env"]
    assert environment["GPUSPAWNER_LEASE_ID"] == lease.id
    assert environment["GPUSPAWNER_GPU_COUNT"] == "1"
    assert environment["GPUSPAWNER_GPU_MODELS"] == "T4"
    assert environment["GPUSPAWNER_RATE"] == "0.500000"
    assert environment["NVIDIA_VISIBLE_DEVICES"] == lease.uuids[0]
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert demo.password() not in json.dumps(environment)


def check_command_line(demo: DemoProcess) -> None:
    """The command finds the demo, its settings and its spawner."""
    environment = os.environ | {"GPUSPAWNER_DEMO_DIR": str(demo.folder)}
    found = {}
    for command in ("rates", "roster", "check --no-containers"):
        found[command] = PRELOADED.run(command.split(), demo.folder.parent, environment, "")
        line = f"hub: demo at {demo.folder} (database {demo.folder}/gpuspawner.sqlite)\n"
        assert found[command].stderr.startswith(line), found[command].stderr
    for price in (r" 4\.00 +A100 ", r" 0\.50 +T4 ", r" 1\.00 +\* "):
        assert re.search(price, found["rates"].stdout)
    assert "The roster is empty" in found["roster"].stdout
    assert "let in by the rules of its sign-in" in found["roster"].stdout
    assert "servers by GPULocalSpawner" in found["check --no-containers"].stdout
    assert "4 devices" in found["check --no-containers"].stdout


def follow_tutorial(demo: DemoProcess) -> None:
    """Type what the tutorial types while the demo runs."""
    (cell,) = (each.text for each in blocks_in(steps.TRY_IT) if each.language == "python")
    member = Visitor(demo.url, "member1", demo.password())
    assert member.run(cell).split() == [demo.leases()[0].uuids[0], "0.500000"]
    environment = os.environ | {"GPUSPAWNER_DEMO_DIR": str(demo.folder)}
    look, give = steps.typed_in(steps.TRY_IT)
    printed = {}
    for block in (look, give):
        for line, _ in steps.lines_of(block):
            (arguments,) = steps.calls_in(line)
            done = PRELOADED.run(arguments, demo.folder.parent, environment, "")
            assert done.returncode == 0, done.stdout + done.stderr
            printed[arguments[0]] = done.stdout
    assert printed["devices"].endswith("3 of 4 devices free (simulated)\n")
    assert "a present" in printed["statement"]


def check_nothing_runs(demo: DemoProcess, processes: list[psutil.Process]) -> None:
    """Neither a process of the demo's, nor anybody at its port, nor an open lease."""
    assert processes
    assert [p for p in processes if alive(p.pid)] == []
    with socket.socket() as trial, pytest.raises(ConnectionRefusedError):
        trial.connect(("127.0.0.1", demo.port))
    with demo.services() as services:
        assert services.leases.open_leases() == []


def test_demo_runs_without_docker(local: DemoProcess) -> None:
    local.start()
    said = local.said()
    assert "GPUs: simulating 4 (2 x A100-80GB, 2 x T4)" in said
    assert "No Docker Engine answers here." in said and "as local processes" in said
    for secret in ("password", "admin-password"):
        assert stat.S_IMODE((local.folder / secret).stat().st_mode) == 0o600
    assert stat.S_IMODE(local.folder.stat().st_mode) == 0o700
    assert (local.folder / "password").read_text().strip() == local.password()

    seen = use_gpus(local, 4, environment="notebook", gpus="1", gpu_model="T4")
    check_command_line(local)
    follow_tutorial(local)
    check_environment(local, seen)
    assert seen["cwd"] == str(local.folder / "workspaces" / "member1" / "work")
    assert {"work", "datasets"} <= set(seen["files"]), "where JupyterLab's file browser opens"
    sample = local.folder / "workspaces" / "member1" / "datasets" / "sample" / "iris.csv"
    assert "setosa" in seen["sample"] and not sample.stat().st_mode & 0o222

    # Ctrl-C while a server runs: it ends too, and what it cost is settled.
    names = " ".join(" ".join(command_of(p)) for p in local.below())
    for part in ("jupyterhub -f", "proxy", "gpuspawner.service", "idle_culler", "singleuser"):
        assert part in names, names
    check_end(local, OPENING_GRANT + PRESENT, seen, signal.SIGINT)
    left = local.balance()
    assert 0 < left < OPENING_GRANT + PRESENT

    # The second demo finds everything again.
    password = local.password()
    local.start()
    assert local.password() == password and f"Found {local.folder}" in local.said()
    assert local.balance() == left
    check_conflicts(local)

    # Its hub is killed: nothing is left of it, and the member pays up to when the server was seen.
    seen = use_gpus(local, 4, environment="several", gpus="2")
    assert seen["notes"] == "one more run\n" * 2
    processes = local.below()
    next(p for p in processes if "jupyterhub -f" in " ".join(command_of(p))).kill()
    assert local.process is not None
    assert local.process.wait(timeout=60 * PATIENCE) == 1
    assert "The hub ended." in local.said()
    check_nothing_runs(local, processes)


def check_conflicts(demo: DemoProcess) -> None:
    """Whoever starts another demo at the same port, or in the same folder, reads a sentence."""
    other = DemoProcess(demo.folder.parent / "other", NO_ENGINE)
    other.port = demo.port
    said = other.refusal()
    assert f"Port {demo.port} cannot be used" in said
    assert f"GPUSPAWNER_DEMO_PORT={demo.port + 100} make demo" in said

    other.folder, other.port = demo.folder, free_port()
    assert f"A demo runs already with the folder {demo.folder}." in other.refusal()


def test_demo_runs_servers_in_docker(
    docker: DemoProcess, clean_engine: PrivateEngine, tmp_path: Path
) -> None:
    docker.environment["GPUSPAWNER_DEMO_PASSWORD"] = "chosen by the newcomer"
    docker.start()
    assert f"Servers: in Docker, from the image {images.BASE}" in docker.said()
    assert docker.password() == "chosen by the newcomer"
    assert not (docker.folder / "password").exists()

    seen = use_gpus(docker, 4, environment="notebook", gpus="1", gpu_model="T4")
    check_environment(docker, seen)
    assert seen["cwd"] == "/home/jovyan/work"
    assert "setosa" in seen["sample"] and seen["sample is read-only"]
    assert len(clean_engine.client.containers()) == 1
    check_end(docker, OPENING_GRANT, seen, signal.SIGTERM)
    wait_for(lambda: not clean_engine.client.containers(all=True), "the deletion")

    # The machine has GPUs, as NVML shows them (here a stand-in); a container proves that the
    # engine hands them over. The member finds credits and files again.
    left = docker.balance()
    gpus = nvml_library.gpus(2)
    clean_engine.set_devices([gpu.uuid for gpu in gpus], model=gpus[0].name)
    library = nvml_library.build_nvml_library(tmp_path / "nvml")
    nvml_library.write_fleet(tmp_path / "fleet", gpus)
    docker.environment |= nvml_library.environment(library, tmp_path / "fleet")
    docker.start()
    assert "GPUs: 2 x NVIDIA A100-SXM4-80GB (driver 550.54.15)" in docker.said()
    assert docker.balance() == left
    seen = use_gpus(docker, 2, environment="notebook")
    lease = docker.leases()[0]
    index = lease.devices[0].index
    assert seen["env"]["NVIDIA_VISIBLE_DEVICES"] == gpus[index].uuid
    assert seen["gpus"] == [f"/dev/nvidia{index}"]
    assert lease.rate == 4 * MICRO
    assert seen["notes"] == "one more run\n" * 2
    check_end(docker, left, seen, signal.SIGHUP)

    # An engine that hands over none: the demo says so, and chooses local processes.
    clean_engine.set_devices([])
    said = docker.refusal(DECIDE)
    assert "The container engine cannot hand GPUs to containers." in said
    assert "as local processes" in said


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (
            {"GPUSPAWNER_DEMO_PASSWORD": "short"},
            "GPUSPAWNER_DEMO_PASSWORD cannot be used: it needs",
        ),
        ({"GPUSPAWNER_DEMO_PORT": "many"}, "GPUSPAWNER_DEMO_PORT is 'many': write a port"),
        ({"GPUSPAWNER_DEMO_DIR": "/proc/demo"}, "The folder /proc/demo cannot be used"),
    ],
)
def test_demo_reports_unusable_settings(
    environment: dict[str, str], sentence: str, local: DemoProcess
) -> None:
    local.environment |= environment
    said = local.refusal()
    assert sentence in said and "Traceback" not in said
