"""Runs the command line and hubs in processes that have their imports behind them.

Each is a process of its own, with its own session, folder, environment, files and exit code, as
``subprocess.Popen`` starts it; but it is forked from one that has imported JupyterHub and
gpuspawner, which takes one to two seconds otherwise, for hundreds of processes. Run as a module,
this file is the process to fork from. A hub that was forked forks its accounting service likewise:
see :func:`fork_service`.
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
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.processes import PATIENCE, REPO, die_with_us

TIMEOUT = 60.0 * PATIENCE
PACKAGES = (
    *("auth", "catalog", "cli", "db", "devices", "hub_pages", "leases", "ledger", "members"),
    *("monitoring", "notifications", "queue", "service", "spawners", "storage", "web"),
)
"""Packages of gpuspawner whose modules are imported ahead."""

READ_EARLY = ("LD_", "PYTHON", "JUPYTERHUB_", "OAUTH", "PROMETHEUS_")
"""How variables begin that are read when a program is loaded or a module is imported. Whoever sets
one of them to what it was not when we imported everything gets a Python that starts from nothing:
a hub with another clock, with modules of the test, or with OAuth."""

LIBRARIES = "LD_LIBRARY_PATH"
"""Read early too, but what is in its folders can be loaded after the fork: a stand-in for NVML."""

READ_BY_SERVICE = (
    *("LD_", "PYTHON", "PROMETHEUS_", "JUPYTERHUB_METRICS_", "JUPYTERHUB_XSRF_"),
    "JUPYTERHUB_SSL_",
)
"""The same for the accounting service. The others are set for each, and are read later, but for
the prefix, which :func:`fork_service` passes on."""

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
        early: tuple[str, ...] = READ_EARLY,
    ) -> subprocess.Popen[bytes] | Forked:
        """``python -c PROGRAM`` or ``python -m MODULE``, leading a session; it ends with us.

        ``streams`` are the files to read from, to print to, and to complain to.
        """
        set_early = {name for name in environment if name.startswith(early)} - {LIBRARIES}
        if any(ENVIRONMENT.get(name) != environment[name] for name in set_early):
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
        return int(json.loads(said))


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
    gc.disable()  # as the service does at its start: what is imported stays
    atexit.register(_end_here)  # the first to be registered is the last to be called
    importlib.import_module("jupyterhub.app")
    sys.modules["sqlalchemy.orm"].configure_mappers()  # each hub does at its start
    for package in PACKAGES:
        path = importlib.import_module(f"gpuspawner.{package}").__path__
        for module in pkgutil.walk_packages(path, f"gpuspawner.{package}."):
            if ".versions." not in module.name and not module.name.endswith((".env", ".__main__")):
                importlib.import_module(module.name)
    templates = sys.modules["gpuspawner.web.pages"].TEMPLATES
    for name in templates.list_templates():  # each service compiles them at its start
        templates.get_template(name)
    gc.freeze()  # what a child does not look at is not copied for it
    gc.enable()
    with open(0, closefd=False) as questions:
        if details := _serve(questions, 1):
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, as die_with_us
            _become(*details)


def _serve(questions: Iterable[str], answers: int) -> list[Any]:
    """Fork and wait as asked until nobody asks any more; in a child, return what to become."""
    for line in questions:
        what, *details = json.loads(line)
        answer: int | None
        if what == "start":
            if not (answer := os.fork()):
                return details
        else:
            pid, status = os.waitpid(details[0], os.WNOHANG if what == "poll" else 0)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        os.write(answers, f"{json.dumps(answer)}\n".encode())
    return []


def _become(
    arguments: list[str], folder: str, environment: dict[str, str], streams: list[str]
) -> None:
    """Be the program from here on."""
    os.setsid()
    for number, file in enumerate(_open(streams) if streams else ()):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    importlib.invalidate_caches()
    # Whoever asks for one of these by its name gets the one that is loaded already.
    known, places = (it.get(LIBRARIES, "").split(os.pathsep) for it in (ENVIRONMENT, environment))
    for place in filter(None, set(places).difference(known)):
        for library in Path(place).glob("*.so*"):
            ctypes.CDLL(str(library))
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


# In a hub that was forked.

SERVICE = [sys.executable, "-m", "gpuspawner.service"]


def fork_service() -> None:
    """Let this hub fork its accounting service, from a process as the hub is now.

    For Hub and tests it is as what ``subprocess.Popen`` starts: below the hub, with a session of
    its own, alive when the hub is killed, and with its command line and environment in /proc.
    """
    hub, keeper = socket.socketpair()
    if os.fork():
        keeper.close()
        from jupyterhub.services import service

        service.Popen = _Keeper(hub).start
        return
    hub.close()
    os.setsid()  # signals to the hub's group are not for this process
    with keeper, keeper.makefile("r", encoding="utf-8") as questions:
        details = _serve(questions, keeper.fileno())
    if not details:
        os._exit(0)
    arguments, folder, environment = details
    _show_in_proc([sys.executable, *arguments], environment)
    from jupyterhub.services.auth import HubOAuth

    prefix = environment.get("JUPYTERHUB_SERVICE_PREFIX", "/")
    HubOAuth.instance = partial(HubOAuth.instance, base_url=prefix)
    _become(arguments, folder, environment, [])
    raise SystemExit(_ended[0])


class _Keeper:
    """The hub's end of the line to the process that forks its service."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line.makefile("rw", encoding="utf-8")
        self._environment = dict(os.environ)

    def start(self, command: Sequence[str], **options: Any) -> Any:
        """Stand in for ``Popen`` in JupyterHub's module of services."""
        given = options["env"]
        early = {name for name in {*given, *self._environment} if name.startswith(READ_BY_SERVICE)}
        is_fresh = any(given.get(name) != self._environment.get(name) for name in early)
        is_ours = command[:3] in (SERVICE, [*SERVICE[:2], "tests.support.service_constants"])
        if not is_ours or options["preexec_fn"] or options["cwd"] or is_fresh:
            return subprocess.Popen(command, **options)
        return _ForkedService(self, self.ask("start", command[1:], os.getcwd(), given))

    def ask(self, *question: object) -> Any:
        self._line.write(json.dumps(question) + "\n")
        self._line.flush()
        return json.loads(self._line.readline())


class _ForkedService(subprocess.Popen[bytes]):
    """What JupyterHub needs of its service's ``Popen``, which its trait ``proc`` must be."""

    _child_created = False  # not by us: nothing is left to be waited for

    def __init__(self, keeper: _Keeper, pid: int) -> None:
        self.pid = pid
        self.returncode: Any = None
        self._keeper = keeper

    def __enter__(self) -> _ForkedService:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._keeper.ask("poll", self.pid)
        return self.returncode


def _show_in_proc(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Let /proc show this command line and environment, and not those of the forking process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    names = {"start_code": 23, "end_code": 24, "start_data": 42, "end_data": 43}
    names |= {"start_brk": 44, "start_stack": 25}
    places = _Places(brk=libc.sbrk(0), exe=-1, **{name: int(stat[n]) for name, n in names.items()})
    shown = (command, [f"{name}={value}" for name, value in environment.items()])
    for texts, kind in zip(shown, ("arg", "env"), strict=True):
        block = b"".join(os.fsencode(text) + b"\0" for text in texts)
        buffer = ctypes.create_string_buffer(block, len(block))
        _shown.append(buffer)
        setattr(places, f"{kind}_start", ctypes.addressof(buffer))
        setattr(places, f"{kind}_end", ctypes.addressof(buffer) + len(block))
    size = ctypes.c_ulong(ctypes.sizeof(places))
    if libc.prctl(35, 14, ctypes.byref(places), size, 0):  # PR_SET_MM, PR_SET_MM_MAP
        raise OSError(ctypes.get_errno(), "the command line cannot be shown")


_PLACES = (
    *("start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack"),
    *("arg_start", "arg_end", "env_start", "env_end"),
)


class _Places(ctypes.Structure):
    """The kernel's ``struct prctl_mm_map``."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in _PLACES),
        ("auxv", ctypes.c_void_p),
        ("auxv_size", ctypes.c_uint32),
        ("exe", ctypes.c_int32),
    ]


_shown: list[Any] = []
"""What the kernel reads for as long as the process lives."""


if __name__ == "__main__":
    main()
