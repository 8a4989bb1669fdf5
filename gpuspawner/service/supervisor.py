"""Supervision of the service's duties, and the watchdog of its event loop."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

PAUSES = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Seconds before a duty is restarted, after its first failure, its second and so on."""

SETTLED_SECONDS = 600.0
"""A duty that ran this long before it failed is restarted after the first pause."""


@dataclass(slots=True)
class DutyState:
    """The state of one duty since the service started."""

    is_running: bool = False
    failures: int = 0
    last_error: str = ""


class Supervisor:
    """Runs duties side by side. No duty ends another one, and none ends unnoticed."""

    def __init__(self, log: logging.Logger, pauses: Sequence[float] = PAUSES) -> None:
        self._log = log
        self._pauses = pauses
        self.states: dict[str, DutyState] = {}
        """Every duty that was started and has more to do, by name."""

    async def keep(self, name: str, start: Callable[[], Awaitable[object]]) -> None:
        """Run the duty that ``start`` makes, anew whenever it raises, until it returns."""
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


HANGS_SECONDS = 30.0
"""An event loop that did not answer for this long is considered hung."""

STEP_SECONDS = 1.0
"""Seconds between two checks of the event loop."""

EXIT_STATUS = 70
"""The exit status of a service that ended itself: EX_SOFTWARE."""


class Watchdog:
    """Checks from a thread that the event loop still answers."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log: logging.Logger) -> None:
        """Create it in the thread of the event loop."""
        self._loop = loop
        self._log = log
        self._watched = threading.get_ident()
        self._answered = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def _watch(self) -> None:
        # Steps are counted, not time: a machine that slept does not have a hung event loop.
        missed = 0
        self._ask()
        while not self._stopped.wait(STEP_SECONDS):
            # For code that never lets another thread run, such as a long regular expression match.
            with suppress(AttributeError, OSError, RuntimeError, ValueError):  # no file to print to
                faulthandler.dump_traceback_later(4 * HANGS_SECONDS, exit=True)
            if self._answered.is_set():
                missed = 0
                self._ask()
            else:
                missed += 1
                if missed * STEP_SECONDS >= HANGS_SECONDS:
                    self._end()
        faulthandler.cancel_dump_traceback_later()

    def _ask(self) -> None:
        self._answered.clear()
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._answered.set)

    def _end(self) -> None:
        frame = sys._current_frames().get(self._watched)
        stack = "".join(traceback.format_stack(frame)) if frame else "unknown\n"
        self._log.critical(
            "The event loop did not answer for %g s. The service ends itself with status %d, and "
            "whatever started it starts it again. Its main thread was here:\n%s",
            HANGS_SECONDS,
            EXIT_STATUS,
            stack,
        )
        for handler in self._log.handlers:
            handler.flush()
        os._exit(EXIT_STATUS)
