"""Linux users for a test's cluster, gone when the last of the runs that share one has ended."""

from __future__ import annotations

import fcntl
import pwd
import subprocess
import tempfile
from pathlib import Path
from typing import IO

from tests.support import processes
from tests.support.processes import as_root, one_at_a_time
from tests.support.slurm_daemons import program


class Users:
    """Makes users and removes them. Each has a lock that every run shares which needs it."""

    def __init__(self) -> None:
        self._locks: dict[str, IO[str]] = {}
        # Not below the slots' folders: a name is the whole machine's.
        self._folder = Path(tempfile.gettempdir(), "gpuspawner-slurm-users")
        self._folder.mkdir(mode=0o777, exist_ok=True)

    def make(self, name: str) -> None:
        """A user without a home, a password or a shell."""
        if name in self._locks:
            return
        with one_at_a_time("linux-users"):
            mark = self._folder / name
            if not mark.exists() and _is_there(name):
                return  # of this machine, and not ours to remove
            lock = open(mark, "a")  # noqa: SIM115 - held until the end
            fcntl.flock(lock, fcntl.LOCK_SH)
            self._locks[name] = lock
            if not _is_there(name):
                options = ["--no-create-home", "--no-user-group", "--shell", "/usr/sbin/nologin"]
                processes.run(as_root([program("useradd"), *options, name]))

    def remove_all(self) -> None:
        """Ours, and those of runs that were killed."""
        for lock in self._locks.values():
            lock.close()
        self._locks.clear()
        with one_at_a_time("linux-users"):
            for path in self._folder.iterdir():
                with open(path, "a") as lock:
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except OSError:
                        continue  # another run needs the user
                    remove = as_root([program("userdel"), path.name])
                    subprocess.run(remove, capture_output=True, check=False)
                    path.unlink()


def _is_there(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
