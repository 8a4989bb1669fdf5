"""Ends one process of a lease, in place of the whole server."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, runtime_checkable


@runtime_checkable
class EngineWithProcesses(Protocol):
    """An engine that can end one process in a container, and write into the container's log."""

    def end_process(self, ref: str, pid: int, signal_name: str) -> bool:
        """Send a signal to a process, by its id inside the container. False if it is gone.

        Blocks. Raises EngineUnavailable.
        """

    def write_log(self, ref: str, line: str) -> None:
        """Write a line into a container's log. Blocks. Raises EngineUnavailable."""


def pid_inside(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Return a process's id in its own container; None if it is gone."""
    with suppress(OSError, ValueError):
        for line in (proc / str(pid) / "status").read_text(errors="replace").splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return None


def send_signal(pid: int, is_right_one: Callable[[int], bool], name: str) -> bool:
    """Send a signal to a process, unless another one has its id by now.

    ``is_right_one`` is asked while the process cannot be mistaken for another. Returns False if the
    process is gone. Raises PermissionError if this program may not send it a signal.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not is_right_one(pid):
            return False
        signal.pidfd_send_signal(process, signal.Signals[name])
    except ProcessLookupError:
        return False
    finally:
        os.close(process)
    return True
