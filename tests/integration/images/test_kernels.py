"""The kernel that is ready before anybody asks, and the export formats that another process lists.
Real: ipykernel, jupyter_client, nbconvert, processes, signals. Each kernel is a real one."""

from __future__ import annotations

import ast
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client import BlockingKernelClient, KernelManager
from jupyter_client.provisioning import KernelProvisionerFactory
from nbconvert.exporters import base

from tests.support.lab import LAB, load_lab_module
from tests.support.processes import PATIENCE, alive, command_of, wait_for

pytestmark = pytest.mark.usefixtures("processes")

SLOW = 60 * PATIENCE

ABOUT = """
import os, signal, sys
here = os.path.abspath("")
environment = {k: v for k, v in os.environ.items() if k not in ("JPY_SESSION_NAME", "_")}
print(dict(
    argv=sys.argv[:2], path=sys.path, folder=here, environment=environment,
    name=__name__, main=sorted(vars(sys.modules["__main__"])), flags=str(sys.flags),
    options=sys._xoptions, leads=(os.getpid() == os.getpgid(0) == os.getsid(0)),
    parent=os.getppid() == int(os.environ["JPY_PARENT_PID"]), stdin=os.read(0, 9),
    signals=[str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)],
    interrupt=getattr(signal.getsignal(signal.SIGINT), "__name__", ""), mask=os.umask(0o22),
    files=sorted(os.readlink("/proc/self/fd/" + n)[:5] for n in os.listdir("/proc/self/fd")
                 if int(n) < 3),
    history=get_ipython().history_manager is not None, module=get_ipython().user_module.__name__,
), flush=True)
"""


kernels = load_lab_module("gpuspawner_kernels")
exporters = load_lab_module("gpuspawner_exporters")


class Kernels:
    """Kernels as a server starts them."""

    def __init__(self, folder: Path, log: logging.Logger) -> None:
        self.folder = folder
        self.ready = kernels.Ready(log)
        self.environment = {**os.environ, "PYTHONPATH": str(folder)}
        self._running: list[KernelManager] = []

    def make_ready(self) -> psutil.Process:
        """The process that waits."""
        specs = KernelManager().kernel_spec_manager
        self.ready.begin(kernels.default_command(specs, "python3"), self.environment)
        return psutil.Process(self.ready._process.pid)

    def start(self, **options: Any) -> tuple[KernelManager, BlockingKernelClient]:
        """One more, with its client."""
        manager = KernelManager(kernel_name="python3", shutdown_wait_time=SLOW)
        manager.connection_file = str(self.folder.parent / f"kernel-{len(self._running)}.json")
        environment = {**self.environment, "JPY_SESSION_NAME": "a.ipynb"}
        manager.start_kernel(**{"cwd": str(self.folder), "env": environment, **options})
        self._running.append(manager)
        return manager, connect(manager)

    def end(self) -> None:
        """All of them."""
        self.ready.end()
        for manager in self._running:
            manager.shutdown_kernel(now=True)


def connect(manager: KernelManager) -> BlockingKernelClient:
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=SLOW)
    return client


def run(client: BlockingKernelClient, code: str) -> str:
    """What the code printed, or how it failed."""
    printed: list[str] = []

    def keep(message: Any) -> None:
        content = message["content"]
        printed.append(content.get("text", "") or content.get("ename", ""))

    client.execute_interactive(code, output_hook=keep, timeout=SLOW)
    return "".join(printed)


@pytest.fixture
def started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Kernels]:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    factory = KernelProvisionerFactory.instance()
    monkeypatch.setitem(factory.provisioners, kernels.READY, kernels.entry_point())
    monkeypatch.setattr(factory, "default_provisioner_name", kernels.READY)
    (tmp_path / "packages").mkdir()
    it = Kernels(tmp_path / "packages", logging.getLogger("server"))
    monkeypatch.setattr(kernels.ReadyProvisioner, "ready", it.ready)
    yield it
    it.end()
    KernelProvisionerFactory.clear_instance()


def process_of(manager: KernelManager) -> subprocess.Popen[bytes]:
    """The process that a kernel is."""
    provisioner = manager.provisioner
    assert isinstance(provisioner, kernels.ReadyProvisioner)
    process = provisioner.process
    assert isinstance(process, subprocess.Popen) and process.pid == provisioner.pid
    return process


def pid_of(manager: KernelManager) -> int:
    return process_of(manager).pid


def test_standby_kernel_behaves_like_a_regular_kernel(
    started: Kernels, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = started.make_ready()
    wait_for(lambda: any("zmq" in m.path for m in waiting.memory_maps()), "its imports")
    manager, client = started.start()
    assert pid_of(manager) == waiting.pid
    assert kernels.STANDBY in waiting.cmdline(), "it became no command"
    assert f"The kernel was ready: process {waiting.pid}." in caplog.text
    other, second = started.start()
    assert pid_of(other) != waiting.pid
    mine, theirs = (ast.literal_eval(run(x, ABOUT)) for x in (client, second))
    assert mine == theirs
    assert mine["folder"] == str(started.folder) and mine["parent"] and mine["stdin"] == b""
    assert run(client, "import os; print(os.environ['JPY_SESSION_NAME'])") == "a.ipynb\n"
    # Interrupted, killed, started anew, asked to end: by the same calls as any other.
    # While a cell prints, ipykernel may take an interrupt for its own: so this one does not.
    message = client.execute("import time; open('begun', 'w').close(); time.sleep(600)")
    wait_for((started.folder / "begun").exists, "the cell to run")
    manager.interrupt_kernel()
    while (reply := client.get_shell_msg(timeout=SLOW))["parent_header"]["msg_id"] != message:
        continue
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    os.kill(waiting.pid, signal.SIGKILL)
    wait_for(lambda: not manager.is_alive(), "the kernel's end to be seen")
    assert process_of(manager).poll() == -signal.SIGKILL
    client.stop_channels()
    again = started.make_ready()
    manager.restart_kernel(now=True)
    assert pid_of(manager) == again.pid != waiting.pid
    client, file = connect(manager), Path(manager.connection_file)
    assert run(client, "print(6 * 7)") == "42\n" and file.exists()
    client.stop_channels()
    process = process_of(manager)
    manager.shutdown_kernel()
    assert process.returncode == 0 and not again.is_running() and not file.exists()


def test_changed_variables_fall_back_to_a_regular_kernel(
    started: Kernels, capfd: pytest.CaptureFixture[str]
) -> None:
    waiting = started.make_ready()
    environment = {**started.environment, "PYTHONUTF8": "1"}
    manager, client = started.start(env=environment)
    assert run(client, "import sys; print(sys.flags.utf8_mode)") == "1\n"
    assert pid_of(manager) == waiting.pid  # it became the command
    command = psutil.Process(waiting.pid).cmdline()
    assert command[1:] == ["-m", "ipykernel_launcher", "-f", manager.connection_file]
    assert "The kernel is started as usual: other environment variables" in capfd.readouterr().err


def test_failed_imports_fall_back_to_a_regular_kernel(
    started: Kernels, capfd: pytest.CaptureFixture[str]
) -> None:
    (started.folder / "sqlite3.py").write_text(
        "import os, sys\nhere = os.path.dirname(__file__)\n"
        "if not os.path.exists(here + '/seen'):\n"
        "    os.mkdir(here + '/seen')\n    raise RuntimeError('not yet')\n"
        "sys.path.remove(here)\ndel sys.modules['sqlite3']\nimport sqlite3\n"
    )
    waiting = started.make_ready()
    manager, client = started.start()
    assert pid_of(manager) == waiting.pid and run(client, "print(6 * 7)") == "42\n"
    assert "started as usual: its modules could not be imported" in capfd.readouterr().err


def test_newly_installed_package_is_seen_by_the_kernel(
    started: Kernels, capfd: pytest.CaptureFixture[str]
) -> None:
    waiting = started.make_ready()
    wait_for(lambda: any("zmq" in m.path for m in waiting.memory_maps()), "its imports")
    (started.folder / "traitlets.py").write_text(
        "import sys\nsys.path.remove(__file__.rpartition('/')[0])\n"
        "del sys.modules['traitlets']\nimport traitlets\ntraitlets.newer = True\n"
    )
    _, client = started.start()
    assert run(client, "import traitlets; print(traitlets.newer)") == "True\n"
    assert "started as usual: packages were installed since" in capfd.readouterr().err


def test_overwritten_module_is_seen_by_the_kernel(
    started: Kernels, capfd: pytest.CaptureFixture[str]
) -> None:
    module = started.folder / "sitecustomize.py"  # which is imported before all others
    (started.folder / "__pycache__").mkdir()
    module.write_text("text = 'old'\n")
    waiting = started.make_ready()
    wait_for(lambda: any("zmq" in m.path for m in waiting.memory_maps()), "its imports")
    module.write_text("text = 'newer'\n")
    os.utime(module, (0, 0))  # as who unpacks an archive leaves it
    _, client = started.start()
    assert run(client, "import sitecustomize as it; print(it.text)") == "newer\n"
    assert "started as usual: a module was changed since" in capfd.readouterr().err


def test_killed_standby_kernel_and_unusual_options_start_a_regular_one(
    started: Kernels, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    usual = [sys.executable, "-m", "ipykernel_launcher", "-f", "file.json"]
    place = {"cwd": str(tmp_path), "env": started.environment}

    def refused(
        why: str, command: list[str], options: dict[str, Any], *, killed: bool = False
    ) -> None:
        waiting = started.make_ready()
        if killed:
            waiting.kill()
            wait_for(lambda: waiting.status() == psutil.STATUS_ZOMBIE, "its end")
        assert started.ready.take(command, options) is None
        assert why in caplog.text
        assert not waiting.is_running(), "nothing is left behind"
        caplog.clear()

    other = "another kind of kernel"
    refused(other, ["/usr/bin/python3", *usual[1:]], place)
    refused(other, [sys.executable, "-Xutf8", *usual[1:]], place)
    refused(other, [sys.executable, "-m", "another_kernel", "-f", "file.json"], place)
    refused("options of its own: stderr", usual, {**place, "stderr": 2})
    refused("its folder is not there", usual, {**place, "cwd": str(tmp_path / "gone")})
    large = {**started.environment, "LARGE": "x" * 100_000}
    refused("its environment is very large", usual, {**place, "env": large})
    refused("the process that was ready has ended (-9)", usual, place, killed=True)


def test_standby_kernel_ends_with_its_server(tmp_path: Path) -> None:
    """A server that is killed closes the pipe, whatever else it leaves undone."""
    code = (
        "import logging, sys, time; import gpuspawner_kernels as kernels; "
        "ready = kernels.Ready(logging.getLogger()); "
        "ready.begin([sys.executable, *kernels.LAUNCHER], {}); "
        "print(ready._process.pid, flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": str(LAB)}
    command = [sys.executable, "-c", code]
    server = psutil.Popen(command, env=environment, stdout=-1, text=True, cwd=tmp_path)
    waiting = psutil.Process(int(server.stdout.readline()))
    server.kill()
    server.communicate()
    wait_for(lambda: not alive(waiting.pid), "its end")


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, True),
        ({"MEM_LIMIT": str(2**31)}, True),
        ({"MEM_LIMIT": str(2**29)}, False),
        ({"GPUSPAWNER_READY_KERNEL": "0"}, False),
        ({"PYTHONPATH": "/opt/lib"}, True),
        ({"PYTHONPATH": "/opt/lib:lib"}, False),
        ({"PYTHONPATH": "/opt/lib:"}, False),
    ],
)
def test_standby_kernel_is_wanted_only_on_suitable_servers(
    variables: dict[str, str], wanted: bool
) -> None:
    assert kernels.wanted({"GPUSPAWNER_GPU_COUNT": "0", **variables}) is wanted
    assert kernels.wanted(variables) is False, "no server of gpuspawner's"


async def test_export_formats_match_those_the_server_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('a file of the member')")
    monkeypatch.chdir(tmp_path)
    names = base.get_export_names()
    listed = {n: {"output_mimetype": base.get_exporter(n).output_mimetype} for n in names}
    assert await exporters.exporters(timeout=SLOW) == listed  # it lets all others go first
    assert "html" in listed


@pytest.mark.parametrize(
    "command",
    [
        ("/no/such/python",),
        (sys.executable, "-c", "raise SystemExit('no')"),
        (sys.executable, "-c", "print('{}'); raise SystemExit(1)"),
        (sys.executable, "-c", "print('[]')"),
        (sys.executable, "-c", "import time; time.sleep(600)"),
    ],
)
async def test_failed_export_list_returns_none_and_leaves_no_process(
    command: tuple[str, ...],
) -> None:
    patience = 1.0 if "sleep" in command[-1] else SLOW
    assert await exporters.exporters(command, patience) is None
    assert not [c for c in psutil.Process().children() if "sleep(600)" in " ".join(command_of(c))]
