"""The machine: what is there, and the programs that are run on it."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ..core.errors import Refused
from .models import BIN_FOLDER, ENGINE_GROUP, USER, Machine, ProgramResult
from .rules import PROXY, ports_in_use

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SOCKET_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
MODULES = ("ldapauthenticator", "ltiauthenticator", "psycopg")
PROGRAM_SECONDS = 180.0
"""Maximum seconds of a program whose output is read."""


class Host(Protocol):
    """What ``init``, ``upgrade`` and ``uninstall`` ask of a machine."""

    @property
    def is_root(self) -> bool:
        """True if this process may change the machine."""

    @property
    def runs(self) -> bool:
        """True if programs can be run on it."""

    def inspect(self, gateway: str) -> Machine:
        """Look at the machine; ``gateway`` is its address on the servers' network."""

    def run(self, *command: str) -> ProgramResult:
        """Run a program and return its output. Raises Refused if it cannot be started."""

    def run_as_hub(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str
    ) -> int:
        """Run a program as the hub's user, with its output on ours, and return its exit code.

        Raises Refused if it cannot be started.
        """


class LocalHost:
    """This machine."""

    runs = True

    @property
    def is_root(self) -> bool:
        """True if this process is root's."""
        return os.geteuid() == 0

    def inspect(self, gateway: str) -> Machine:
        """Look at this machine."""
        folder = str(Path(sys.executable).parent)
        path = f"{folder}:{SYSTEM_PATH}"
        found = {name: shutil.which(name, path=path) for name in ("docker", "node", PROXY)}
        return Machine(
            has_systemd=Path("/run/systemd/system").is_dir(),
            programs={name: path for name, path in found.items() if path},
            groups=frozenset(g for g in (ENGINE_GROUP,) if _exists(grp.getgrnam, g)),
            users=frozenset(u for u in (USER,) if _exists(pwd.getpwnam, u)),
            ports_in_use=ports_in_use(map(_text, SOCKET_TABLES), gateway),
            missing_modules=frozenset(name for name in MODULES if find_spec(name) is None),
            bin_folder=folder,
        )

    def run(self, *command: str) -> ProgramResult:
        """Run a program and return its output. Raises Refused if it cannot be started."""
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment(),
                timeout=PROGRAM_SECONDS,
                text=True,
                errors="replace",
                check=False,
            )
        except FileNotFoundError:
            raise Refused(f"There is no command {command[0]} on this machine.") from None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Refused(f"{command[0]} does not run: {error}.") from error
        return ProgramResult(done.returncode, done.stdout.strip())

    def run_as_hub(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str
    ) -> int:
        """Run a program as the hub's user, with its output on ours, and return its exit code."""
        sys.stdout.flush()
        try:
            return run_apart(
                command,
                env={"HOME": folder, "LC_ALL": "C.UTF-8", "TERM": "dumb", **environment},
                cwd=folder,
                user=USER,
                group=pwd.getpwnam(USER).pw_gid,
                extra_groups=[ENGINE_GROUP],
                umask=0o077,
            )
        except (KeyError, OSError) as error:
            raise Refused(f"{command[0]} does not run as the user {USER}: {error}.") from error


class OfflineHost:
    """The machine that an image will become: it cannot be inspected, and nothing runs on it."""

    is_root = True
    runs = False

    def __init__(self, root: Path) -> None:
        own = Path(sys.executable).parent
        root = root.resolve()
        below = own.is_relative_to(root)
        self.bin_folder = f"/{own.relative_to(root)}" if below else BIN_FOLDER

    def inspect(self, gateway: str) -> Machine:
        """Return a machine that has what it needs."""
        proxy = f"{self.bin_folder}/{PROXY}"
        return Machine(
            has_systemd=False,
            programs={"docker": "/usr/bin/docker", "node": "/usr/bin/node", PROXY: proxy},
            groups=frozenset((ENGINE_GROUP,)),
            users=frozenset((USER,)),
            ports_in_use=frozenset(),
            missing_modules=frozenset(),
            bin_folder=self.bin_folder,
        )

    def run(self, *command: str) -> ProgramResult:
        """Refuse to run a program."""
        raise Refused(f"{command[0]} cannot be run: this is an image, not a running machine.")

    def run_as_hub(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str
    ) -> int:
        """Refuse to run a program."""
        return self.run(*command).code


def run_apart(command: Sequence[str], **options: Any) -> int:
    """Run a program that has no terminal to type into, and return its exit code.

    Without a session of its own, a program of another user could type commands into the terminal
    that it prints to. An interrupt is passed on, and the program may end in its own time: an
    upgrade puts the database back first. ``options`` go to :class:`subprocess.Popen`.
    """
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, **options
    ) as program:
        try:
            return program.wait()
        except KeyboardInterrupt:
            os.killpg(program.pid, signal.SIGINT)
            program.wait()
            raise


def _environment() -> dict[str, str]:
    """Return what programs need of our environment, which may contain secrets."""
    needed = {n: v for n, v in os.environ.items() if n == "HOME" or n.startswith("DOCKER_")}
    return {**needed, "PATH": SYSTEM_PATH, "LC_ALL": "C.UTF-8"}


def _exists(look_up: Callable[[str], object], name: str) -> bool:
    try:
        look_up(name)
    except KeyError:
        return False
    return True


def _text(name: str) -> str:
    path = Path(name)
    return path.read_text(encoding="ascii") if path.exists() else ""
