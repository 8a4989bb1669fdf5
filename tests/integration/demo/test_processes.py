"""scripts/demo_processes.py: nothing that came out of the demo outlives it. Real processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.processes import PATIENCE, REPO, alive

pytestmark = pytest.mark.usefixtures("processes")

DEMO = """
import subprocess, sys
import demo_processes
demo_processes.adopt_descendants()
hub = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(hub.stdout.readline(), end="", flush=True)
print("left:", demo_processes.end_descendants(patience=1.0) or "nothing")
print(hub.stdout.read())
"""
SLEEP = """
import os, signal, subprocess, sys, time
def sleep():
    null = subprocess.DEVNULL
    return subprocess.Popen(["sleep", "100"], start_new_session=True, stdout=null)
"""
HUBS = {
    # What JupyterHub does with its servers, and Jupyter with its kernels.
    "a-session-of-its-own": """
print(sleep().pid, flush=True)
time.sleep(100)
""",
    "deaf": """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
time.sleep(100)
""",
    # /proc calls it a zombie, and it still is the parent of the kernel.
    "ended-but-for-a-thread": """
import ctypes, threading
def last():
    started = sleep()
    while " Z " not in open("/proc/self/stat").read():
        time.sleep(0.01)
    print(started.pid, flush=True)
    time.sleep(100)
threading.Thread(target=last).start()
ctypes.CDLL(None).pthread_exit(None)
""",
    "starts-one-more-at-its-end": """
def more(*_):
    print(sleep().pid, flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, more)
print(os.getpid(), flush=True)
time.sleep(100)
""",
    "a-parent-that-is-gone": """
if os.fork() == 0:
    os.setsid()
    print(sleep().pid, flush=True)
""",
}

LATE = """
import signal, subprocess
import demo_processes
known = demo_processes._signal
def signal_late(pids, number):
    if number == signal.SIGKILL and not late:
        late.append(subprocess.Popen(["sleep", "100"]).pid)
        print(late[0], flush=True)
    known(pids, number)
late = []
demo_processes._signal = signal_late
"""
"""A process is started after the look that is to find all of them."""


@pytest.mark.parametrize("hub", HUBS)
def test_demo_leaves_no_process_running(hub: str) -> None:
    assert_nothing_is_left(DEMO, HUBS[hub])


def test_process_that_starts_while_all_are_killed_is_killed_too() -> None:
    assert_nothing_is_left(LATE + DEMO, HUBS["deaf"])


def assert_nothing_is_left(demo: str, hub: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", demo, SLEEP + hub],
        env={**os.environ, "PYTHONPATH": str(REPO / "scripts")},
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
    )
    assert "left: nothing" in run.stdout, run.stdout + run.stderr
    pids = [int(line) for line in run.stdout.splitlines() if line.isdigit()]
    assert pids and not [pid for pid in pids if alive(pid)]
