"""A process forked from one with its imports is as one that Python started. Real: processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.nvml import nvml_library
from tests.support.preloaded import PRELOADED, PYTHONPATH, start_plainly
from tests.support.processes import REPO, alive, wait_for

pytestmark = pytest.mark.usefixtures("processes")

FACTS = """
import asyncio, ctypes, json, logging, os, random, resource, signal, sys, threading, time
word = sys.stdin.read()
died = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(died))
print(json.dumps({
    "arguments": sys.argv, "python": sys.executable, "path": sys.path, "name": __name__,
    "main": sys.modules["__main__"].__dict__ is globals(), "word": word,
    "folder": os.getcwd(), "environment": dict(os.environ), "zone": time.tzname,
    "leads": [os.getsid(0), os.getpgrp()] == [os.getpid()] * 2, "ends with": died.value,
    "files": sorted(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")),
    "signals": [repr(signal.getsignal(s)).split(" at ")[0] for s in signal.valid_signals()],
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "umask": os.umask(0),
    "limits": [resource.getrlimit(n) for n in range(16)], "log": repr(logging.root.handlers),
    "loop": hasattr(asyncio.get_event_loop_policy()._local, "_loop"), "nice": os.nice(0),
    "encodings": [sys.stdout.encoding, sys.stderr.encoding, sys.getfilesystemencoding()],
}), random.random())
sys.exit(7)
"""


def environment(**more: str) -> dict[str, str]:
    here = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "TZ": "Asia/Tokyo"}
    return here | {"PYTHONPATH": PYTHONPATH, "WORD": "gr\u00fc\u00dfe"} | more


def facts(folder: Path, start: Any) -> tuple[dict[str, Any], str]:
    folder.mkdir()
    (folder / "in").write_text("typed")
    streams = [str(folder / name) for name in ("in", "out", "err")]
    process = start(["-c", FACTS, "more"], folder.parent, environment(), streams)
    assert process.wait(timeout=120) == 7 and process.poll() == 7
    assert (folder / "err").read_text() == ""
    told, _, chance = (folder / "out").read_text().rpartition(" ")
    found: dict[str, Any] = json.loads(told)
    return found, chance


def test_forked_process_matches_a_fresh_python_process(tmp_path: Path) -> None:
    plain, _ = facts(tmp_path / "plain", start_plainly)
    forked, chance = facts(tmp_path / "forked", PRELOADED.start)
    _, other = facts(tmp_path / "other", PRELOADED.start)
    assert forked == plain
    assert chance != other


def test_process_exit_status_is_reported(tmp_path: Path) -> None:
    null = [os.devnull] * 3
    sleeps = ["-c", "import time; time.sleep(600)"]
    process = PRELOADED.start(sleeps, tmp_path, environment(), null)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.01)
    process.kill()
    assert process.wait(timeout=60) == -signal.SIGKILL
    process.kill()  # of what has ended, nothing
    process = PRELOADED.start(["-c", "1 / 0"], tmp_path, environment(), null)
    assert process.wait(timeout=60) == 1


SHOWN = """
from pathlib import Path
def shown(name):
    return Path("/proc/self", name).read_text().strip("\\0").split("\\0")
"""

HUB = """
import json, os, subprocess, sys, time
from jupyterhub.services import service
from tests.support import preloaded
preloaded.SERVICE[1:] = ["-m", "facts"]
preloaded.fork_service()
for start in (subprocess.Popen, service.Popen):
    process = start(
        preloaded.SERVICE, env={**os.environ, "JUPYTERHUB_SERVICE_NAME": "gpu"}, cwd=None,
        preexec_fn=None, start_new_session=True,
    )
    service._ServiceSpawner().proc = process
    while process.poll() is None:
        time.sleep(0.01)
    assert process.returncode == 7 and process.poll() == 7
    assert type(process).__name__ == ("Popen" if start is subprocess.Popen else "_ForkedService")
"""


def test_forked_service_matches_a_plain_one(tmp_path: Path) -> None:
    """Also in what /proc shows of it, by which tests find and end it."""
    known = FACTS.replace(
        '"umask"', '"command": shown("cmdline"), "shown": sorted(shown("environ")), "umask"'
    )
    (tmp_path / "facts.py").write_text(SHOWN + known)
    streams = [os.devnull, str(tmp_path / "out"), str(tmp_path / "err")]
    process = PRELOADED.start(["-c", HUB], tmp_path, environment(TZ="UTC"), streams)
    assert process.wait(timeout=120) == 0, (tmp_path / "err").read_text()
    plain, forked = (
        json.loads(line.rpartition(" ")[0]) for line in (tmp_path / "out").read_text().splitlines()
    )
    assert forked == plain
    assert "JUPYTERHUB_SERVICE_NAME=gpu" in forked["shown"]
    assert (tmp_path / "err").read_text() == ""


def test_forked_service_outlives_a_killed_hub(tmp_path: Path) -> None:
    (tmp_path / "facts.py").write_text("import time; open('began', 'w').close(); time.sleep(600)")
    hub = HUB.replace("(subprocess.Popen, service.Popen)", "(service.Popen,)").replace(
        "time.sleep(0.01)", "print(process.pid, flush=True); time.sleep(600)"
    )
    streams = [os.devnull, str(tmp_path / "out"), str(tmp_path / "err")]
    process = PRELOADED.start(["-c", hub], tmp_path, environment(), streams)
    wait_for((tmp_path / "began").exists, "the service")
    service = int(wait_for((tmp_path / "out").read_text, "what the hub prints"))
    process.kill()
    process.wait(timeout=60)
    assert alive(service)
    os.kill(service, signal.SIGKILL)
    wait_for(lambda: not alive(service), "the service to end")


@pytest.mark.parametrize(
    ("name", "value", "forked"),
    [
        ("DOCKER_HOST", "unix:///run/docker.sock", True),
        ("LD_LIBRARY_PATH", "/opt", True),
        ("LD_PRELOAD", "libc.so.6", False),
        ("PYTHONPATH", f"/opt{os.pathsep}{REPO}", False),
        ("PYTHONHASHSEED", "7", False),
        ("OAUTH_CALLBACK_URL", "http://127.0.0.1", False),
        ("JUPYTERHUB_METRICS_PREFIX", "other", False),
    ],
)
def test_import_time_variables_prevent_forking(
    name: str, value: str, forked: bool, tmp_path: Path
) -> None:
    sleeps = ["-c", "import time; time.sleep(600)"]
    given = environment(**{name: value})
    process = PRELOADED.start(sleeps, tmp_path, given, [os.devnull] * 3)
    try:
        assert (type(process) is not subprocess.Popen) == forked
    finally:
        process.kill()
        process.wait()


def test_forked_program_finds_the_libraries_of_its_path(tmp_path: Path) -> None:
    """As the loader would, which has read LD_LIBRARY_PATH before: a stand-in for NVML."""
    library = nvml_library.build_nvml_library(tmp_path / "nvml")
    nvml_library.write_fleet(tmp_path / "fleet", nvml_library.gpus(3))
    given = environment(**nvml_library.environment(library, tmp_path / "fleet"))
    counts = ["-c", "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetCount())"]
    streams = [os.devnull, str(tmp_path / "out"), str(tmp_path / "out")]
    process = PRELOADED.start(counts, tmp_path, given, streams)
    assert type(process) is not subprocess.Popen
    assert process.wait(timeout=120) == 0
    assert (tmp_path / "out").read_text() == "3\n"


def test_killed_run_leaves_no_processes(tmp_path: Path) -> None:
    """The process to fork from and those that were forked end with who asked for them."""
    run = f"""
import os, signal, time
from tests.support.preloaded import PRELOADED
sleeps = ["-c", "import time; open('began', 'w').close(); time.sleep(600)"]
forked = PRELOADED.start(sleeps, {str(tmp_path)!r}, dict(os.environ), [os.devnull] * 3)
print(PRELOADED._process.pid, forked.pid, flush=True)
while not os.path.exists({str(tmp_path / "began")!r}):
    time.sleep(0.02)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", run],
        env=environment(),
        cwd=REPO,
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    wait_for(lambda: not any(alive(pid) for pid in pids), "both to end")
