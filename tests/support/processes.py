"""Small helpers around real processes: root, ports, waiting, ending, the test cache."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import psutil

REPO = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
"""Where the virtual environment keeps its programs (the proxy's wrapper among them)."""

PATIENCE = 4
"""How many times longer than at rest a wait may take: whoever runs these tests may have other work
on the machine. A wait that comes true ends at once."""

T = TypeVar("T")


class HasLog(Protocol):
    """A running part whose log a failing test should show."""

    name: str

    def log_text(self) -> str: ...


LIVE: list[HasLog] = []
"""Every part that runs now. ``conftest.py`` adds their logs to a failing test's report."""


def kept_dir() -> Path:
    """Where every checkout on this machine finds what is slow to make, by a name that says what it
    was made of (``GPUSPAWNER_TEST_CACHE`` moves it). The folder may be removed at any time.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(os.environ.get("GPUSPAWNER_TEST_CACHE") or Path(caches, "gpuspawner-tests"))
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Nobody else on this machine makes this meanwhile: who waited finds what the other made."""
    with open(kept_dir() / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def take_slot(prefix: str, slots: int) -> tuple[int, Path, IO[str]]:
    """One of the places of a kind that a machine has: its number, its folder, and the lock that
    keeps both ours until it is closed. A killed run has let go of its own.
    """
    for slot in range(slots):
        directory = Path(tempfile.gettempdir(), f"{prefix}-{slot}")
        directory.mkdir(mode=0o755, exist_ok=True)
        if directory.stat().st_uid != os.geteuid():
            continue  # another user tests here too
        lock = open(directory / "lock", "a")  # noqa: SIM115 - held by whoever asked
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            continue
        return slot, directory, lock
    raise RuntimeError(f"no place is free for {prefix}: {slots} are taken on this machine")


def as_root(argv: Sequence[str]) -> list[str]:
    """The command as root: itself when we are root, else through sudo without a prompt."""
    return list(argv) if os.geteuid() == 0 else ["sudo", "-n", *argv]


def run(argv: Sequence[str | Path], **kwargs: Any) -> str:
    """Run to the end and return what it printed; a failure raises with that text in it."""
    done = subprocess.run(
        [str(a) for a in argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **kwargs,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{argv[0]} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def die_with_us(argv: Sequence[str]) -> list[str]:
    """The command, ended by the kernel if the test run is killed before it can clean up."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM", "--", *argv] if setpriv else list(argv)


def system_path(*first: Path) -> str:
    """A PATH that also finds what Debian puts into ``sbin``."""
    parts = [str(p) for p in first] + os.environ.get("PATH", "").split(os.pathsep)
    for extra in ("/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin"):
        if extra not in parts:
            parts.append(extra)
    return os.pathsep.join(p for p in parts if p)


PORTS = 2000
"""Ports of each of the processes that run tests beside one another, from :data:`FIRST_PORT` on:
below those that the kernel gives to connections, which could be taken before we listen."""
FIRST_PORT = 12000

_given: set[int] = set()


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nobody listens on right now; none is given twice, nor to two
    runs on one machine."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 10
    ours = range(FIRST_PORT + worker * PORTS, FIRST_PORT + (worker + 1) * PORTS)
    while True:
        port = random.choice(ours)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            if port not in _given:
                # One byte of the file for each port, locked as long as this process lives.
                fcntl.lockf(_port_locks(os.getpid()), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
                _given.add(port)
                return port


@cache
def _port_locks(pid: int) -> int:
    """The file of this process (a fork has none of its parent's locks), by its descriptor."""
    path = Path(tempfile.gettempdir(), f"gpuspawner-ports-{os.geteuid()}")
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def wait_for(
    look: Callable[[], T | None], what: str, *, timeout: float = 30.0, interval: float = 0.0
) -> T:
    """Call ``look`` until it answers something true, and return that.

    ``timeout`` (seconds) is for a machine at rest; a busy one gets PATIENCE times as long.
    ``interval`` (seconds) is the pause between two calls. Without one it grows with the wait, from
    0.02 to 0.25: to ask a hub all the time takes the processor from those who are waited for.
    """
    timeout *= PATIENCE
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began  # before the look: the last one begins after the timeout
        if found := look():
            return found
        if waited > timeout:
            raise TimeoutError(f"waited {timeout:.0f} s for {what}")
        time.sleep(interval or min(0.25, max(0.02, waited / 15)))


def signal_pid(pid: int, number: int) -> None:
    """Send a signal, through sudo when the process is root's and we are not."""
    with contextlib.suppress(ProcessLookupError):
        try:
            os.kill(pid, number)
        except PermissionError:
            subprocess.run(as_root(["kill", f"-{number}", str(pid)]), check=False)


def alive(pid: int) -> bool:
    """True while the process runs (a zombie has ended)."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def end_process(pid: int, *, timeout: float = 20.0) -> None:
    """SIGTERM, and SIGKILL when that was not heard in time."""
    signal_pid(pid, signal.SIGTERM)
    try:
        wait_for(lambda: not alive(pid), f"process {pid} to end", timeout=timeout)
    except TimeoutError:
        signal_pid(pid, signal.SIGKILL)
        wait_for(lambda: not alive(pid), f"killed process {pid} to end", timeout=10)


def kill_all(doomed: Iterable[psutil.Process]) -> None:
    """SIGKILL, and wait until each has really ended."""
    doomed = list(doomed)
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    wait_for(lambda: not any(alive(p.pid) for p in doomed), "killed processes to end")


def command_of(process: psutil.Process) -> list[str]:
    """Its command line; empty when it has ended since it was listed."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Its environment; empty when it has ended since it was listed, or is not ours to read."""
    with contextlib.suppress(psutil.Error, OSError):
        return dict(process.environ())
    return {}


def with_descendants(pids: Iterable[int]) -> Iterator[int]:
    """The given processes and everything below them."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield from (p.pid for p in psutil.Process(pid).children(recursive=True))
            yield pid
