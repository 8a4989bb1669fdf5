"""Files below a root folder: each has its old or its new text, whenever the process is killed."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core.errors import Refused
from .models import PRIVATE, RECORD, Answers, Record, TargetFile
from .rules import hash_of

STAFF = 50
"""Debian's group that may write below ``/usr/local``: its members are as good as root."""


class FileTree:
    """The files of a machine, or of an image below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, target: str) -> Path:
        """Return where a path of the machine is. Raises Refused if a link leads out of the root."""
        path = self.root / target.lstrip("/")
        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.root)):
            raise Refused(f"{path} is a link, or in one, that leads out of {self.root}: remove it.")
        return path

    def read(self, target: str) -> str | None:
        """Return a file's text; None if there is no file. Raises Refused."""
        path = self.path(target)
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except UnicodeDecodeError:
            raise Refused(f"{path} is not text in UTF-8: correct it, or move it away.") from None
        except OSError as error:
            raise Refused(f"{path} cannot be read: {error.strerror}.") from None

    def mode(self, target: str) -> int:
        """Return a file's permissions; 0 if there is no file."""
        try:
            return stat.S_IMODE(self.path(target).stat().st_mode)
        except OSError:
            return 0

    def is_folder(self, target: str) -> bool:
        """Return True if there is a folder."""
        return self.path(target).is_dir()

    def list(self, target: str) -> Iterator[str]:
        """Yield the paths of all files below a folder."""
        for path in self.path(target).rglob("*"):
            if not path.is_dir():
                yield f"/{path.relative_to(self.root)}"

    def write(self, file: TargetFile) -> None:
        """Write a file with its mode, in the place of an older one. Raises Refused."""
        path = self.path(file.path)
        part = path.with_name(f".{path.name}.gpuspawner-new")
        try:
            _make_folder(path.parent)
            _require_closed(path.parent)
            part.unlink(missing_ok=True)  # of a process that was killed
            try:
                _write(part, file.text, file.mode)
                os.replace(part, path)
            except BaseException:
                with suppress(OSError):
                    part.unlink()
                raise
            _flush_folder(path.parent)
        except OSError as error:
            raise Refused(f"{path} cannot be written: {error.strerror}.") from error

    def set_mode(self, target: str, mode: int) -> None:
        """Set a file's permissions. Raises Refused."""
        path = self.path(target)
        try:
            path.chmod(mode)
        except OSError as error:
            raise Refused(f"The mode of {path} cannot be set: {error.strerror}.") from error

    def remove(self, target: str) -> None:
        """Remove a file, if there is one. Raises Refused."""
        path = self.path(target)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise Refused(f"{path} cannot be removed: {error.strerror}.") from error

    def remove_empty_folder(self, target: str) -> bool:
        """Remove a folder if nothing is in it. Return False if it stays."""
        try:
            self.path(target).rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    # The record of what was written.

    def load_record(self) -> Record:
        """Return what ``init`` wrote; an empty record if it never ran. Raises Refused."""
        with suppress(FileNotFoundError):
            _require_closed(self.path(RECORD).parent)
        text = self.read(RECORD)
        if text is None:
            return Record()
        try:
            return _record(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise Refused(
                f"{self.path(RECORD)} is damaged: restore it from a backup, or remove it; init "
                "then asks about each file that is not as it would write it."
            ) from None

    def save_record(self, record: Record) -> None:
        """Write the record, unless it is unchanged. Raises Refused."""
        text = json.dumps(asdict(record), indent=2, sort_keys=True) + "\n"
        if self.read(RECORD) != text:
            self.write(TargetFile(RECORD, text, PRIVATE))


def _record(found: Mapping[str, Any]) -> Record:
    answers = found["answers"]
    if answers is not None:
        answers = Answers(**{**answers, "admins": tuple(answers["admins"])})
    hashes = {str(path): tuple(map(str, each)) for path, each in found["hashes"].items()}
    return Record(answers, hashes, bool(found["made_network"]), tuple(found["restarts"]))


def is_ours(record: Record, target: str, text: str) -> bool:
    """Return True if nobody edited the text of a file since ``init`` wrote it."""
    return hash_of(text) in record.hashes.get(target, ())


def _write(path: Path, text: str, mode: int) -> None:
    """Write a new file, closed to others before anything is in it, and flush it to disk."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, PRIVATE)
    with open(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, mode)
        file.write(text)
        file.flush()
        os.fsync(descriptor)


def _make_folder(folder: Path) -> None:
    """Make a folder that the hub's user can open, regardless of the umask."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir()
        folder.chmod(0o755)


def _require_closed(folder: Path) -> None:
    """Raise Refused if somebody else can replace the files that we read and write as root."""
    found = folder.stat()
    by_group = found.st_mode & 0o020 and found.st_gid not in (0, os.getegid(), STAFF)
    if found.st_uid not in (0, os.geteuid()) or by_group or found.st_mode & 0o002:
        raise Refused(
            f"Not only root can write in {folder}. Close it first: chown root:root {folder} && "
            f"chmod 755 {folder}"
        )


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
