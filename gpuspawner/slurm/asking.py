"""One question to somebody who may hang, asked for many by one thread at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

LOG = logging.getLogger(__name__)

PATIENCE, AWAY_PATIENCE = 5.0, 1.0
"""Seconds that somebody waits for an answer of Slurm; and who can do without one, or when it gave
none the last time: a hub has few threads for all that its members want."""


class Asker:
    """Asks, and lets as many wait for the end of it as like, none of them for long.

    Whoever asks in a thread of their own would hold it as long as nobody answers; a hub has few.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        """``ask`` keeps the answer itself, and also that there was none."""
        self._ask = ask
        self._news = threading.Condition()
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Since when it is being asked; 0 when it is not."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def wait(self, is_due: Callable[[], bool], patience: float) -> bool:
        """Have it asked when it is due, unless that goes on; False when it is still going on so
        many seconds after it began."""
        with self._news:
            if not is_due():
                return True
            if self._since is None:
                # First: where no thread can be started just now, the next one tries again.
                threading.Thread(target=self._run, name="gpuspawner-asker", daemon=True).start()
                self._since = time.monotonic()
            began = self._since
            while self._since == began:
                left = began + patience - time.monotonic()
                if left <= 0:
                    return False
                self._news.wait(left)
            return True

    def _run(self) -> None:
        try:
            self._ask()
        except Exception:  # a mistake of ours: the next one asks again
            LOG.exception("A question to Slurm failed")
        finally:
            with self._news:
                self._since = None
                self._news.notify_all()
