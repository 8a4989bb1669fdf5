"""The hub as a process of the demo's, and the end of everything that came out of it. Linux."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_descendants() -> None:
    """From now on, what a dead child leaves behind becomes our child: nothing gets lost."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(
    command: Sequence[str], *, folder: Path, environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """A child in a session of its own, so that Ctrl-C reaches us alone.

    It is asked to end when we are killed. Its log starts anew; the last one is kept beside it.
    """
    if log.exists():
        log.replace(log.with_suffix(".old.log"))
    with open(log, "wb") as output:
        return subprocess.Popen(
            list(command),
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
        )


def end(child: subprocess.Popen[bytes], patience: float) -> bool:
    """Ask a child to end, and insist after ``patience`` seconds. Whether it ended by itself."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    try:
        child.wait(patience)
        return True
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return False


def end_descendants(patience: float = 5.0) -> set[int]:
    """End every process below us: first asked, then killed. Those that could not be ended.

    Needs :func:`adopt_descendants` before any of them was started.
    """
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 10.0)):
        _signal(descendants(), number)
        deadline = time.monotonic() + seconds
        while not childless() and time.monotonic() < deadline:
            time.sleep(0.05)
            if number == signal.SIGKILL:  # what was started while we looked for it
                _signal(descendants(), number)
    return set() if childless() else descendants()


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def childless() -> bool:
    """Whether nothing is left below us; what has ended is let go.

    Who loses its parent becomes our child, so this is the kernel's own word. A look at /proc is
    not: a process starts or changes its parent while we look.
    """
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def descendants() -> set[int]:
    """The processes below us; an ended one too, as a thread of it, with children, may live on."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)):
            parents[int(entry.name)] = parent
    below: set[int] = set()
    layer = {os.getpid()}
    while layer:
        layer = {pid for pid, parent in parents.items() if parent in layer} - below
        below |= layer
    return below


def _parent(entry: Path) -> int:
    """The parent of a process; 0 when it is no longer there."""
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
