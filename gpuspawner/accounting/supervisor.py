"""Keeps the service's duties alive: one that fails is logged, counted and started again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

PAUSES = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Seconds before a duty is started again, after its first failure, its second and so on."""

SETTLED_SECONDS = 600.0
"""A duty that ran for so long before it failed is started again after the first pause."""


@dataclass(slots=True)
class DutyState:
    """What is known of one duty since the service started."""

    is_running: bool = False
    failures: int = 0
    last_error: str = ""


class Supervisor:
    """Runs duties side by side. None of them ends another one, and none ends unnoticed."""

    def __init__(self, log: logging.Logger, pauses: Sequence[float] = PAUSES) -> None:
        self._log = log
        self._pauses = pauses
        self.states: dict[str, DutyState] = {}
        """Every duty that was started and has more to do, by its name."""

    async def keep(self, name: str, start: Callable[[], Awaitable[object]]) -> None:
        """Run a duty until it returns or this is cancelled; start it again when it raises.

        ``start`` makes the duty, and is called again after each failure.
        """
        state = self.states.setdefault(name, DutyState())
        now = asyncio.get_running_loop().time
        in_a_row = 0
        while True:
            state.is_running, began = True, now()
            try:
                await start()
                del self.states[name]
                return
            except Exception as error:
                state.failures += 1
                state.last_error = f"{type(error).__name__}: {error}"
                in_a_row = 1 if now() - began > SETTLED_SECONDS else in_a_row + 1
                pause = self._pauses[min(in_a_row, len(self._pauses)) - 1]
                message = "The duty %r failed, and starts again in %g s"
                self._log.error(message, name, pause, exc_info=error)
            finally:
                state.is_running = False
            await asyncio.sleep(pause)
