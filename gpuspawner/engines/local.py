"""Local processes as an engine: for trying out. Linux only (it reads /proc)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path

from ..core.processes import lives, process_ref
from ..leases.models import Lease, ServerRef, Sighting

LEASE_VARIABLE = "GPUSPAWNER_LEASE_ID"
_MARK = f"{LEASE_VARIABLE}=".encode()


class LocalEngine:
    """Servers that run as processes beside the hub, found by the lease in their environment."""

    name = "local"

    def sightings(self) -> list[Sighting]:
        """Return the first process of every lease: a session leader, not a kernel below it."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (sighting := _sighting(int(entry.name))):
                found.append(sighting)
        return found

    def removed(self, leases: Iterable[Lease], found: Iterable[Sighting]) -> list[Sighting]:
        """Return servers whose recorded process lives, although it no longer shows its lease."""
        there = {sighting.lease_id for sighting in found}
        return [
            Sighting(lease_id=lease.id, ref=lease.engine_ref, server=lease.server, alive=True)
            for lease in leases
            if lease.engine == self.name and lease.id not in there and lives(lease.engine_ref)
        ]

    def end(self, sighting: Sighting) -> None:
        """Terminate the process group, and kill it after ten seconds."""
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
    """Return when a process was started, by the wall clock; ``ref`` as of :func:`process_ref`."""
    ticks = int(ref.partition(":")[2])
    passed = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return datetime.fromtimestamp(time.time() - passed, tz=timezone.utc)
