"""Project quotas of XFS, and measured sizes on other file systems.

Each directory is a project of its own. ``xfs_quota`` sets and reads them, called with a list of
arguments; it has to run as root, or through ``sudo``.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import struct
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.errors import QuotaUnavailable

MEASURE_SECONDS = 2.0
"""Seconds for measuring before a start; a tree that takes longer counts as unknown."""


def measure(directory: str, patience: float | None = MEASURE_SECONDS) -> int | None:
    """Return the bytes on disk below a directory; None if unknown or not measured in time.

    Symlinks count themselves and are never followed, other file systems are left out, and a file
    with several names counts once. Blocks.
    """
    end = None if patience is None else time.monotonic() + patience
    try:
        top = os.stat(directory, follow_symlinks=False)
        if not stat.S_ISDIR(top.st_mode):
            return None
        return _measure(directory, top, end)
    except (OSError, RecursionError, TimeoutError):
        return None


def _measure(directory: str, top: os.stat_result, end: float | None) -> int:
    total, linked = _size(top), set[int]()
    for _, folders, files, descriptor in os.fwalk(directory, onerror=_give_up):
        for name in (*folders, *files):
            try:
                seen = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            except FileNotFoundError:
                continue  # a server may run meanwhile
            if seen.st_dev != top.st_dev or seen.st_ino in linked:
                continue
            if seen.st_nlink > 1 and not stat.S_ISDIR(seen.st_mode):
                linked.add(seen.st_ino)
            total += _size(seen)
        folders[:] = [name for name in folders if _is_on(name, descriptor, top.st_dev)]
        if end is not None and time.monotonic() > end:
            raise TimeoutError
    return total


def _is_on(name: str, descriptor: int, device: int) -> bool:
    try:
        return os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_dev == device
    except FileNotFoundError:
        return False


def _size(seen: os.stat_result) -> int:
    return seen.st_blocks * 512


def _give_up(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


SPARE = 64 * 2**20
"""Bytes, or a hundredth of the limit if that is less: with no more left, it counts as full."""

QUOTA_SECONDS = 60.0
"""Seconds for one call; the first for a directory visits every file in it."""

_GET_ATTRIBUTES = 0x801C581F
"""FS_IOC_FSGETXATTR of linux/fs.h, whose answer is five numbers and eight bytes."""
_ATTRIBUTES = struct.Struct("=IIIII8x")
_INHERIT = 0x200
"""FS_XFLAG_PROJINHERIT: new files in the directory belong to its project."""

_SAFE = re.compile(r"/[^\s\"'\\]*")
_LEFT_ALONE = "skipping special file"
_TOLD = re.compile(r"^\S+\s+(\d+)\s+\d+\s+(\d+)\s", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class QuotaUse:
    """How much of a member's or a folder's quota is used."""

    used: int
    """Bytes."""
    limit: int | None
    """Bytes; None: no limit."""

    @property
    def full(self) -> bool:
        """True if almost nothing is left."""
        if not self.limit:
            return False
        return self.used > self.limit - min(SPARE, self.limit // 100)


@dataclass(frozen=True)
class Quotas:
    """Sets and reads the quotas of directories on this machine. Blocks."""

    command: Sequence[str] = ("xfs_quota",)
    """xfs_quota, or what runs it as root: ``["sudo", "-n", "xfs_quota"]``."""

    def set(self, directory: str, project: int, limit: int) -> None:
        """Limit a directory to ``limit`` bytes. Doing it twice changes nothing.

        Raises QuotaUnavailable.
        """
        path, mount = self._place(directory)
        if project_of(path) != project:
            self._run(mount, f"project -s -p {path} {project}")
            if project_of(path) not in (project, None):
                raise QuotaUnavailable(path=path, why="the file system keeps no projects")
        self._run(mount, f"limit -p bhard={limit} {project}")
        told = self._read(mount, project)
        if told is None or (told.limit or 0) < limit:
            raise QuotaUnavailable(path=path, why=self._nothing_told())

    def clear(self, directory: str, project: int) -> None:
        """Remove the limit of a project; ``directory`` may be gone. Raises QuotaUnavailable."""
        _, mount = self._place(directory)
        self._run(mount, f"limit -p bhard=0 {project}")

    def use(self, directory: str, project: int) -> QuotaUse:
        """Return a directory's use and limit. Raises QuotaUnavailable."""
        path, mount = self._place(directory)
        if (found := self._read(mount, project)) is None:
            raise QuotaUnavailable(path=path, why=self._nothing_told())
        return found

    def problem(self, directory: str) -> str:
        """Return why quotas are not possible below a directory, in words, or ""."""
        try:
            _, mount = self._place(directory)
            if "Enforcement: ON" not in self._run(mount, "state -p"):
                raise QuotaUnavailable(path=directory, why=NOT_KEPT)
        except QuotaUnavailable as error:
            return error.message
        return ""

    def _read(self, mount: str, project: int) -> QuotaUse | None:
        """Return a project's use; None if it has no quota there."""
        told = _TOLD.search(self._run(mount, f"quota -p -N -v -b -n {project}"))
        if told is None:
            return None
        used, limit = (int(number) * 1024 for number in told.groups())
        return QuotaUse(used, limit or None)

    def _nothing_told(self) -> str:
        """Return why there was no output: xfs_quota prints nothing without permission."""
        return NOT_ROOT if os.geteuid() and [*self.command] == ["xfs_quota"] else NOT_KEPT

    def _place(self, directory: str) -> tuple[str, str]:
        """Return the real path of a directory, and the mount point of its file system."""
        path = os.path.realpath(directory)
        if not _SAFE.fullmatch(path):  # xfs_quota splits commands at spaces
            raise QuotaUnavailable(path=directory, why="its path has a space or a quote in it")
        mount = path
        while not os.path.ismount(mount):
            mount = os.path.dirname(mount)
        return path, mount

    def _run(self, mount: str, order: str) -> str:
        # Where xfs_quota is, and where a hub's PATH often does not look.
        path = [os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]
        # -D and -P: not the admin's own /etc/projects and /etc/projid.
        words = [*self.command, "-x", "-D", os.devnull, "-P", os.devnull, "-c", order, mount]
        try:
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=QUOTA_SECONDS,
                check=False,
                env={**os.environ, "LC_ALL": "C", "PATH": os.pathsep.join(path)},
            )
        except FileNotFoundError:
            why = f"there is no {self.command[0]} on this machine (package xfsprogs)"
            raise QuotaUnavailable(path=mount, why=why) from None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise QuotaUnavailable(
                path=mount, why=f"xfs_quota did not respond ({error})"
            ) from error
        # It exits with 0 even on failure, so its output decides. For symlinks, sockets and devices,
        # which it rightly leaves alone, it prints that it did.
        wrong = [x for x in done.stderr.splitlines() if x.strip() and _LEFT_ALONE not in x]
        if done.returncode or wrong:
            raise QuotaUnavailable(path=mount, why=_why(wrong or done.stdout.splitlines()))
        return done.stdout


NOT_ROOT = 'xfs_quota has to run as root: set c.GPUFolders.xfs_quota = ["sudo", "-n", "xfs_quota"]'
NOT_KEPT = "its file system keeps no project quotas (XFS, mounted with prjquota)"


def project_of(directory: str) -> int | None:
    """Return the project that a directory passes on to new files; 0 if none.

    None: we are not permitted to read it.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        answer = fcntl.ioctl(descriptor, _GET_ATTRIBUTES, bytes(_ATTRIBUTES.size))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    flags, _, _, project, _ = _ATTRIBUTES.unpack(answer)
    return int(project) if flags & _INHERIT else 0


def _why(lines: list[str]) -> str:
    said, line = "\n".join(lines), next(iter(lines), "it said nothing")
    if "Operation not permitted" in said or "ermission denied" in said:
        return NOT_ROOT
    if "No such device or address" in said or "cannot setup path" in said:
        return NOT_KEPT
    return line.strip().rstrip(".")[:200]
