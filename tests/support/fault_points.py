"""Moments on the way of a run at which a hub or its accounting service halts, to be killed there.

The test arms a moment such as ``before grant``. The first process that gets there halts, the test
kills one or two processes, and those that are still alive go on. ``tests.support.halting`` is the
side of the hub and the service.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import wait_for


class FaultPoint:
    """One moment at a time, in files that the test shares with the hub and its service."""

    def __init__(self, folder: Path) -> None:
        self._awaited = folder / "moment.awaited"
        self._reached = folder / "moment.reached"

    def arm(self, moment: str) -> None:
        """Let the first process that reaches this moment halt."""
        part = self._awaited.with_suffix(".part")
        part.write_text(moment, encoding="utf-8")
        part.replace(self._awaited)

    def take(self, moment: str) -> bool:
        """Return True in the one process that halts."""
        try:
            if self._awaited.read_text(encoding="utf-8") != moment:
                return False
            self._awaited.rename(self._reached)
        except FileNotFoundError:
            return False
        return True

    @property
    def is_reached(self) -> bool:
        """True while a process halts, or was killed there."""
        return self._reached.exists()

    def wait(self) -> None:
        """Wait until a process halts."""
        wait_for(lambda: self.is_reached, "a process that halts", timeout=60)

    def let_go(self) -> None:
        """Let the halted process go on."""
        self._reached.unlink(missing_ok=True)
        self._awaited.unlink(missing_ok=True)
