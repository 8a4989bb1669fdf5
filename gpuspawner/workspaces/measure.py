"""How much a directory holds, counted by looking: for file systems that keep no count."""

from __future__ import annotations

import os
import stat
import time

PATIENCE = 2.0
"""Seconds for one look before a start; a tree that takes longer is not known."""


def measure(directory: str, patience: float | None = PATIENCE) -> int | None:
    """The bytes on disk of everything below a directory; None when nobody can say in time.

    Symlinks count as what they are and are never followed, other file systems are left out,
    a file with several names counts once. Blocks.
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
