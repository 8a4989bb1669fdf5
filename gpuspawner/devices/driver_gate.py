"""The gate through the store: who has NVML open, and who must close it for a while.

An instance can be made or destroyed only while nobody else uses its GPU, and the driver counts a
process that merely watches it. So hub and accounting service record in the store that they have
NVML open, close it as soon as a change of a MIG layout begins, and open it again after its end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

import sqlalchemy as sa

from ..core.errors import GPUSpawnerError
from ..core.processes import this_process
from ..db.engine import Store
from . import repository

LOOK_EVERY = 2.0
"""Seconds between two looks into the store while NVML is open."""


@dataclass(eq=False)
class StoredDriverGate:
    """See :class:`gpuspawner.devices.source.DriverGate`. Thread-safe."""

    store: Store
    clock: Callable[[], datetime]
    log: logging.Logger
    look_every: float = LOOK_EVERY
    _left: threading.Event = field(default_factory=threading.Event, init=False)

    def enter(self, release: Callable[[], None]) -> bool:
        """Record that NVML is opened. If the store is away, nobody can change a layout either."""
        try:
            with self.store.write() as connection:
                now = self.clock()
                if repository.is_nvml_held(connection, now):
                    return False
                repository.add_nvml_client(connection, this_process(), now)
        except GPUSpawnerError as error:
            self.log.warning("NVML is opened without a record of it: %s", error.message)
        self._left = threading.Event()
        watch = threading.Thread(
            target=self._watch, args=(self._left, release), name="nvml-gate", daemon=True
        )
        watch.start()
        return True

    def leave(self) -> None:
        """Record that NVML is closed."""
        self._left.set()
        try:
            with self.store.write() as connection:
                repository.remove_nvml_client(connection, this_process())
        except GPUSpawnerError as error:
            self.log.warning("It is not recorded that NVML was closed: %s", error.message)

    def _watch(self, left: threading.Event, release: Callable[[], None]) -> None:
        while not left.wait(self.look_every):
            try:
                is_held = self.store.run(self._is_held)
            except GPUSpawnerError:
                continue  # nobody can begin a change meanwhile
            if is_held:
                self.log.info("NVML is closed until the MIG layout of a GPU is changed")
                release()
                return

    def _is_held(self, connection: sa.Connection) -> bool:
        return repository.is_nvml_held(connection, self.clock())
