"""The programs below a cluster: each in the foreground, with a log, ended when we are."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.support import processes
from tests.support.processes import as_root, wait_for


class Daemon:
    """One program: start, stop, kill and start it again."""

    def __init__(self, name: str, command: Sequence[str | Path], log: Path) -> None:
        self.name = name
        self.command = [str(word) for word in command]
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether it has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self, answers: Callable[[], bool] | None = None) -> None:
        """Start it, and wait until it answers."""
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                processes.die_with_us(as_root(self.command)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
            )
        if answers:
            self.wait(answers)

    def wait(self, answers: Callable[[], bool]) -> None:
        """Until it answers; what it wrote goes into the error when it ended instead."""

        def look() -> bool:
            if not self.running:
                raise RuntimeError(f"{self.name} ended at once:\n{self.log_text()}")
            return answers()

        wait_for(look, f"{self.name} to answer", timeout=30)

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send it a signal, and wait until it has ended."""
        if self._process is None:
            return
        for pid in self._pids():
            processes.signal_pid(pid, number)
        try:
            self._process.wait(timeout=20 * processes.PATIENCE)  # killed, it would forget jobs
        except subprocess.TimeoutExpired:
            for pid in self._pids():
                processes.signal_pid(pid, signal.SIGKILL)
            self._process.wait(timeout=20)
        self._process = None

    def log_text(self) -> str:
        """Its last lines."""
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""

    def _pids(self) -> list[int]:
        """The program itself, which is sudo's child where we are not root."""
        assert self._process
        if os.geteuid() == 0:
            return [self._process.pid]
        try:
            return [child.pid for child in psutil.Process(self._process.pid).children()]
        except psutil.NoSuchProcess:
            return []


def as_user(name: str, command: Sequence[str | Path]) -> list[str]:
    """The command as one of the users that Debian's packages make; started by root.

    The kernel forgets whose end should end a process when its user changes: it is told after that.
    """
    user = pwd.getpwnam(name)
    who = [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    return ["setpriv", *who, "--", *processes.die_with_us([str(word) for word in command])]


def on_machine(name: str, command: Sequence[str | Path]) -> list[str]:
    """The command on a machine that is called so; started by root."""
    words = [str(word) for word in command]
    return ["unshare", "--uts", "--", "sh", "-c", 'hostname "$0" && exec "$@"', name, *words]


def program(name: str) -> str:
    """Where Debian put it, also for who has no ``sbin`` on their PATH."""
    found = shutil.which(name, path=processes.system_path())
    if not found:
        raise RuntimeError(f"{name} is not installed: run scripts/test_parts.sh")
    return found


def folder_of(user: str, path: Path, mode: str = "0755") -> Path:
    """An empty folder of that user."""
    processes.run(as_root(["install", "-d", "-o", user, "-m", mode, str(path)]))
    return path


def file_of(user: str, path: Path, content: bytes, mode: str) -> Path:
    """A file of that user, which nobody else could read even for a moment."""
    draft = path.with_name(f".{path.name}.draft")
    draft.touch(mode=0o600)
    draft.write_bytes(content)
    processes.run(as_root(["install", "-o", user, "-m", mode, str(draft), str(path)]))
    draft.unlink()
    return path


def munge(folder: Path) -> Daemon:
    """A munged with a key and a socket of its own, started."""
    file_of("munge", folder / "munge.key", secrets.token_bytes(128), "0400")
    return munged(folder, "munge")


def munged(
    folder: Path, name: str, around: Callable[[list[str]], list[str]] = lambda command: command
) -> Daemon:
    """Another munged of the same key, with its socket in the folder of that name, started."""
    home = folder_of("munge", folder / name)
    places = {
        "--key-file": folder / "munge.key",
        "--socket": home / "socket",
        "--pid-file": home / "pid",
        "--log-file": home / "log",
        "--seed-file": home / "seed",
    }
    options = [f"{key}={value}" for key, value in places.items()]
    words = around(["munged", "--foreground", "--num-threads=4", *options])
    daemon = Daemon("munged", as_user("munge", words), folder / f"log/{name}d")

    def answers() -> bool:
        asked = ["munge", "-S", str(home / "socket"), "-n"]
        return subprocess.run(asked, capture_output=True, check=False).returncode == 0

    daemon.start(answers)
    return daemon


def mariadb(folder: Path, port: int, password: str) -> Daemon:
    """A MariaDB with a data folder and a port of its own and an empty database, started."""
    data = folder_of("mysql", folder / "mariadb")
    # One that starts removes the temporary tables of every other in the same folder.
    temporary = folder_of("mysql", folder / "mariadb-tmp")
    common = ["--no-defaults", f"--datadir={data}", f"--tmpdir={temporary}"]
    install = ["mariadb-install-db", *common, "--user=mysql", "--skip-test-db"]
    install.append("--auth-root-authentication-method=normal")
    processes.run(as_root(install), env=dict(os.environ, PATH=processes.system_path()))
    first = folder / "mariadb.sql"
    first.touch(mode=0o600)
    first.write_text(
        "CREATE DATABASE slurm_accounting;\n"
        f"CREATE USER slurm@'127.0.0.1' IDENTIFIED BY '{password}';\n"
        "GRANT ALL ON slurm_accounting.* TO slurm@'127.0.0.1';\n"
    )
    processes.run(as_root(["chown", "mysql", str(first)]))
    socket = data / "socket"
    switches = [
        f"--socket={socket}",
        f"--port={port}",
        "--bind-address=127.0.0.1",
        f"--pid-file={data}/pid",
        f"--init-file={first}",
        "--innodb-buffer-pool-size=128M",
        "--innodb-lock-wait-timeout=900",
        "--innodb-log-file-size=64M",
        # A test's data need not outlive the machine's power.
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-flush-method=nosync",
        "--skip-name-resolve",
    ]
    command = as_user("mysql", ["mariadbd", *common, *switches])
    daemon = Daemon("mariadbd", command, folder / "log/mariadbd")
    daemon.start(lambda: socket.exists())
    return daemon
