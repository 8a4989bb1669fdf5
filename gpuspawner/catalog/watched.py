"""The catalog in a file, read anew when the file changes; a broken edit changes nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import MutableMapping
from typing import Any

from ..errors import ConfigError, GPUSpawnerError
from . import Catalog, load

AGAIN = 5.0
"""Seconds after which a file that was not right is read again: what it names may be there now."""

Stamp = tuple[int, int, int, int]


class WatchedCatalog:
    """What a file says, as it last was right. Thread-safe.

    Looking whether the file changed is one question to the file system. Files that
    environments name are not watched: whoever shows one reads it then.
    """

    def __init__(self, path: str | os.PathLike[str], log: logging.Logger | Any = None) -> None:
        self.path = os.fspath(path)
        self.log = log or logging.getLogger(__name__)
        self.problem = ""
        """Why what the file says now does not hold; empty when it does."""
        self._lock = threading.Lock()
        self._good: Catalog | None = None
        self._stamp: Stamp | str | None = "never read"
        self._read_at = 0.0
        self._reading: threading.Thread | None = None

    def current(self) -> Catalog:
        """The catalog as the file is now, else as it last was right.

        Raises ConfigError when it was never right. On an event loop a change is read in a thread,
        and counts once it has been read: await :meth:`refresh` before, where it has to count now.
        """
        good = self._good
        if good is not None and _is_on_event_loop():
            if self.is_due() and not (self._reading and self._reading.is_alive()):
                self._reading = threading.Thread(target=self._read_if_due, daemon=True)
                self._reading.start()
            return good
        self._read_if_due()
        if self._good is None:
            raise ConfigError(self.problem)
        return self._good

    async def refresh(self) -> None:
        """Read a change of the file, if there is one, off the event loop."""
        if self.is_due():
            await asyncio.to_thread(self._read_if_due)

    def is_due(self) -> bool:
        """Return True if the file changed, or is to be tried again."""
        return self._is_due(self._look())

    def _is_due(self, stamp: Stamp | None) -> bool:
        if stamp != self._stamp:
            return True
        return bool(self.problem) and time.monotonic() - self._read_at > AGAIN

    def _read_if_due(self) -> None:
        with self._lock:
            stamp = self._look()
            if self._is_due(stamp):
                self._read(stamp)

    def _look(self) -> Stamp | None:
        """What tells one state of the file from another; None when it cannot be seen."""
        try:
            seen = os.stat(self.path)
        except OSError:
            return None
        return seen.st_mtime_ns, seen.st_size, seen.st_ino, seen.st_dev

    def _read(self, stamp: Stamp | None) -> None:
        before = self._good
        try:
            found = load(self.path)
        except GPUSpawnerError as error:
            self._refuse(stamp, error.message)
            return
        except Exception:  # a defect of ours must not take the environments away
            self.log.exception("The catalog %s cannot be read", self.path)
            self._refuse(stamp, f"{self.path} cannot be read; the hub's log says more.")
            return
        self._read_at = time.monotonic()
        self._good, self._stamp, self.problem = found, stamp, ""
        if before is not None:
            self.log.info(
                "The catalog changed: %d environments (%d before)",
                len(found.environments),
                len(before.environments),
            )

    def _refuse(self, stamp: Stamp | None, problem: str) -> None:
        if problem != self.problem:
            stays = "; the last good one stays" if self._good else ""
            self.log.error("The catalog is not right%s. %s", stays, problem)
        self._stamp, self._read_at, self.problem = stamp, time.monotonic(), problem


def _is_on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def watched(settings: MutableMapping[str, Any], path: str, log: Any = None) -> WatchedCatalog:
    """The one for this file in a hub's settings, made by whoever needs it first."""
    kept: dict[str, WatchedCatalog] = settings.setdefault("gpuspawner_catalogs", {})
    if path not in kept:
        kept[path] = WatchedCatalog(path, log)
    return kept[path]
