"""Ends a service whose event loop hangs, so that the Hub or systemd starts it again."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import traceback
from contextlib import suppress

HANGS_SECONDS = 30.0
"""An event loop that did not answer for so long does not answer any more."""

STEP_SECONDS = 1.0
"""Seconds between two questions to the event loop."""

EXIT_STATUS = 70
"""Of a service that ended itself: EX_SOFTWARE."""


class Watchdog:
    """Asks the event loop, from a thread, whether it still answers."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log: logging.Logger) -> None:
        """To be made in the thread of the event loop."""
        self._loop = loop
        self._log = log
        self._watched = threading.get_ident()
        self._answered = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._stopped.set()

    def _watch(self) -> None:
        # Steps are counted, not time: a machine that slept is no event loop that hangs.
        missed = 0
        self._ask()
        while not self._stopped.wait(STEP_SECONDS):
            # For what never lets another thread run, as a long match of a regular expression.
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
