"""Processes by a name that stays unique, so that one process can tell if another still runs."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path


def process_ref(pid: int) -> str:
    """Return ``pid:start time``, unique over time; empty if the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        return ""
    return f"{pid}:{fields[19]}"


def lives(ref: str) -> bool:
    """Return True if the process of this ``pid:start time`` runs."""
    pid = ref.partition(":")[0]
    return pid.isdigit() and process_ref(int(pid)) == ref


@cache
def boot_id() -> str:
    """Return the id of this boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # a sandbox without it: every boot counts as the same
        return "unknown"


def this_process() -> str:
    """Return this process's identity: ``boot id, process namespace, pid:start time``."""
    return f"{boot_id()} {_namespace()} {process_ref(os.getpid())}"


def is_surely_gone(identity: str) -> bool:
    """Return True if the process with this identity has ended.

    A process of another container, whose processes cannot be seen from here, may still run.
    """
    boot, namespace, ref = identity.split(" ")
    if boot != boot_id():
        return True
    return namespace == _namespace() and not lives(ref)


def describe(identity: str) -> str:
    """Describe a process for people: ``process 1234``, and whether it is in another container."""
    _, namespace, ref = identity.split(" ")
    elsewhere = "" if namespace == _namespace() else " of another container"
    return f"process {ref.partition(':')[0]}{elsewhere}"


def find_by_words(*words: str) -> list[int]:
    """Return the processes whose command line has these words, one after the other."""
    wanted = b"\0" + b"\0".join(word.encode() for word in words) + b"\0"
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended
                if wanted in b"\0" + (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return sorted(found)


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"
