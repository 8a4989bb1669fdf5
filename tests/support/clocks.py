"""Programs whose clock is not this machine's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_daemons import Daemon, munged
from tests.support.slurm_node import Node

LIBRARY = "faketime/libfaketimeMT.so.1"


def wall_clock_apart(seconds: int) -> Callable[[list[str]], list[str]]:
    """As :func:`apart`, as if somebody had set the clock: the time since boot stays as it is."""
    around = apart(seconds)
    return lambda command: around(["env", "FAKETIME_DONT_FAKE_MONOTONIC=1", *command])


class WallClock:
    """A wall clock for programs that a test sets while they run; the time since boot stays."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0)

    def set(self, seconds: int) -> None:
        """So many seconds ahead of ours. Programs see it within a second."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+d}s\n")
        new.replace(self._file)

    @property
    def environment(self) -> dict[str, str]:
        """What a program needs in its environment."""
        return {
            "LD_PRELOAD": _library(),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }


def apart(seconds: int) -> Callable[[list[str]], list[str]]:
    """Puts a command into a time that is so many seconds ahead of ours, and goes as fast.

    Programs in Go ask the kernel themselves and keep our time; and a thread of Python's that waits
    for an event with a timeout would wait for longer.
    """
    variables = [f"LD_PRELOAD={_library()}", f"FAKETIME={seconds:+d}s"]
    return lambda command: ["env", *variables, *command]


def _library() -> str:
    found = [str(path) for path in Path("/usr/lib").glob(f"*/{LIBRARY}")]
    if not found:
        raise RuntimeError("faketime is not installed: run scripts/test_parts.sh")
    return found[0]


@contextmanager
def node_apart(cluster: SlurmCluster, node: Node, seconds: int) -> Iterator[None]:
    """A node whose munged and slurmd are so many seconds ahead of ours."""
    folder, around = cluster.directory, apart(seconds)
    key = munged(folder, f"munge-{node.name}", around)
    name = f"slurmd of {node.name}"
    ours = cluster._daemons[name]
    ours.end()
    conf, socket = folder / f"etc-{node.name}", str(folder / f"munge-{node.name}/socket")
    conf.mkdir()
    for file in cluster.conf.parent.glob("*.conf"):
        if file.name != "slurmdbd.conf":
            text = file.read_text().replace(str(cluster.places.munge), socket)
            (conf / file.name).write_text(text)
    command = [w.replace(str(cluster.conf), str(conf / "slurm.conf")) for w in ours.command]
    at = command.index("env")
    theirs = Daemon(name, [*command[:at], *around(command[at:])], ours.log)
    cluster._daemons[name] = theirs
    try:
        theirs.start()
        yield
    finally:
        theirs.end()
        key.end()
        cluster._daemons[name] = ours
        ours.start()
