"""Runs the command line and hubs in processes that have their imports behind them.

Each is a process of its own, with its own session, folder, environment, files and exit code, as
``subprocess.Popen`` starts it; but it is forked from one that has imported JupyterHub and
gpuspawner, which takes one to two seconds otherwise, for hundreds of processes. Run as a module,
this file is the process to fork from.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.processes import PATIENCE, REPO, die_with_us

TIMEOUT = 60.0 * PATIENCE
PACKAGES = (
    *("auth", "catalog", "cli", "db", "devices", "hub_pages", "leases", "ledger", "members"),
    *("monitoring", "notifications", "queue", "spawners", "storage", "web"),
)
"""Packages of gpuspawner whose modules are imported ahead."""

READ_EARLY = ("LD_", "PYTHON", "JUPYTERHUB_", "OAUTH", "PROMETHEUS_")
"""How variables begin that are read when a program is loaded or a module is imported. Whoever sets
one of them to what it was not when we imported everything gets a Python that starts from nothing:
a hub with another clock or a stand-in for NVML, with modules of the test, or with OAuth."""

_paths = [str(REPO), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
PYTHONPATH = os.pathsep.join(dict.fromkeys(filter(None, _paths)))
ENVIRONMENT = {k: v for k, v in os.environ.items() if k.startswith(("LD_", "PYTHON"))}
ENVIRONMENT |= {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "TZ": "UTC"}
ENVIRONMENT |= {"PYTHONPATH": PYTHONPATH}


class Preloaded:
    """The process to fork from; started when somebody first asks, ended with its stdin."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def start(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        streams: Sequence[str],
    ) -> subprocess.Popen[bytes] | Forked:
        """``python -c PROGRAM`` or ``python -m MODULE``, leading a session; it ends with us.

        ``streams`` are the files to read from, to print to, and to complain to.
        """
        early = [name for name in environment if name.startswith(READ_EARLY)]
        if any(ENVIRONMENT.get(name) != environment[name] for name in early):
            return start_plainly(arguments, folder, environment, streams)
        pid = self._ask("start", list(arguments), str(folder), dict(environment), list(streams))
        return Forked(self, pid)

    def run(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], answer: str
    ) -> subprocess.CompletedProcess[str]:
        """``python -m gpuspawner ARGUMENTS`` in a folder, with ``answer`` as its input."""
        with tempfile.TemporaryDirectory() as files:
            streams = [os.path.join(files, name) for name in ("in", "out", "err")]
            Path(streams[0]).write_text(answer, encoding="utf-8")
            process = self.start(["-m", "gpuspawner", *arguments], folder, environment, streams)
            try:
                code = process.wait(timeout=TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            out, err = (Path(name).read_text(encoding="utf-8") for name in streams[1:])
        return subprocess.CompletedProcess(list(arguments), code, out, err)

    def _ask(self, *question: object) -> int:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    cwd=REPO,
                    env=ENVIRONMENT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,  # Ctrl-C is for the tests, which end what they began
                )
            assert self._process.stdin and self._process.stdout
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            said = self._process.stdout.readline()
        if not said.strip():
            raise RuntimeError("the process to fork from has ended")
        return int(said)


class Forked:
    """A process that was forked; its methods are those of ``subprocess.Popen``."""

    def __init__(self, preloaded: Preloaded, pid: int) -> None:
        self.pid = pid
        self._preloaded = preloaded
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            # Its number is its own until its parent, which is not us, asks for its exit code.
            ended = os.pidfd_open(self.pid)
            try:
                if not select.select([ended], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            finally:
                os.close(ended)
            self._code = self._preloaded._ask("wait", self.pid)
        return self._code

    def poll(self) -> int | None:
        try:
            return self.wait(timeout=0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


PRELOADED = Preloaded()


def start_plainly(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], streams: Sequence[str]
) -> subprocess.Popen[bytes]:
    """The same with a Python that starts from nothing."""
    files = _open(streams)
    try:
        return subprocess.Popen(
            die_with_us([sys.executable, *arguments]),
            cwd=folder,
            env=dict(environment),
            stdin=files[0],
            stdout=files[1],
            stderr=files[2],
            start_new_session=True,
        )
    finally:
        for file in files:
            os.close(file)


def _open(streams: Sequence[str]) -> list[int]:
    added = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    flags = (os.O_RDONLY, added, added)
    return [os.open(name, flag, 0o666) for name, flag in zip(streams, flags, strict=True)]


# Below here: the process to fork from.


def main() -> None:
    atexit.register(_end_here)  # the first to be registered is the last to be called
    # As the hubs of tests/support/hub.py do; once that is imported it is too late for them.
    sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
    importlib.import_module("jupyterhub.app")
    for package in PACKAGES:
        path = importlib.import_module(f"gpuspawner.{package}").__path__
        for module in pkgutil.walk_packages(path, f"gpuspawner.{package}."):
            if ".versions." not in module.name and not module.name.endswith(".env"):
                importlib.import_module(module.name)
    libc = ctypes.CDLL(None)
    gc.freeze()  # what a child does not look at is not copied for it
    for line in open(0, "rb", closefd=False):  # noqa: SIM115 - closed as the process ends
        what, *details = json.loads(line)
        if what == "wait":
            answer = os.waitstatus_to_exitcode(os.waitpid(details[0], 0)[1])
        elif not (answer := os.fork()):
            libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, as die_with_us
            _become(*details)
            return
        os.write(1, f"{answer}\n".encode())


def _become(
    arguments: list[str], folder: str, environment: dict[str, str], streams: list[str]
) -> None:
    """Be the program from here on."""
    os.setsid()
    for number, file in enumerate(_open(streams)):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    importlib.invalidate_caches()
    kind, program, *rest = arguments
    if kind == "-c":
        sys.argv, sys.path[0] = ["-c", *rest], ""
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(program, sys.modules["__main__"].__dict__)
        return
    sys.argv, sys.path[0] = [program, *rest], folder
    code: object = 0
    try:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as exit:
        code = exit.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
    _ended.append(code if isinstance(code, int) else int(code is not None))


_ended: list[int] = []
"""The exit code of a command that has ended as it should."""


def _end_here() -> None:
    """Exit without taking apart what was imported: that takes a command longest."""
    if _ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_ended[0])


if __name__ == "__main__":
    main()
