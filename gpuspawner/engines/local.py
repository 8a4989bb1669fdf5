"""Local processes as an engine: for trying out. Linux only (it reads /proc)."""

from __future__ import annotations

import os
import signal
import time
from datetime import datetime, timezone
from pathlib import Path

from ..model import ServerRef, Sighting

LEASE_VARIABLE = "GPUSPAWNER_LEASE_ID"
_MARK = f"{LEASE_VARIABLE}=".encode()


class LocalEngine:
    """Servers that run as processes beside the hub, found by the lease in their environment."""

    name = "local"

    def sightings(self) -> list[Sighting]:
        """The first process of every lease: a session leader, not a kernel below it."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (sighting := _sighting(int(entry.name))):
                found.append(sighting)
        return found

    def end(self, sighting: Sighting) -> None:
        """Ask the process group to end, and insist after ten seconds."""
        pid, _, started = sighting.ref.partition(":")
        for sign, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 2.0)):
            try:
                os.killpg(os.getpgid(int(pid)), sign)
            except ProcessLookupError:
                return
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline:
                if process_ref(int(pid)) != f"{pid}:{started}":
                    return
                time.sleep(0.1)


def process_ref(pid: int) -> str:
    """``pid:start time``, which no later process can have; empty when the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        return ""
    return f"{pid}:{fields[19]}"


def _sighting(pid: int) -> Sighting | None:
    if pid == os.getpid():
        return None
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        if _MARK not in environ or os.getsid(pid) != pid:
            return None
    except OSError:
        return None
    pairs = (item.partition(b"=") for item in environ.split(b"\0"))
    values = {
        name.decode(errors="replace"): text.decode(errors="replace") for name, _, text in pairs
    }
    ref = process_ref(pid)
    if not ref or LEASE_VARIABLE not in values:
        return None
    started = started_at(ref)
    return Sighting(
        lease_id=values[LEASE_VARIABLE],
        ref=ref,
        server=ServerRef(
            values.get("JUPYTERHUB_USER", ""), values.get("JUPYTERHUB_SERVER_NAME", "")
        ),
        alive=True,
        created_at=started,
        started_at=started,
    )


def started_at(ref: str) -> datetime | None:
    """When a process was started, by the wall clock; ``ref`` as from :func:`process_ref`."""
    ticks = int(ref.partition(":")[2])
    passed = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return datetime.fromtimestamp(time.time() - passed, tz=timezone.utc)
