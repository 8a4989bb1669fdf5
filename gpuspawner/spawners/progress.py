"""Messages to the member of a pending spawn: its progress, image pulls, and refusals."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

from markupsafe import Markup

from ..core.aio import within
from ..core.errors import GPUSpawnerError, ImageUnavailable, Refused, StartFailed
from ..core.times import minute_after, zoned
from ..engines.images import Connect, PullProgress, pull
from .compat import SpawnException

SIGN = 10.0
"""Seconds between two keep-alive events; the pending page drops the stream after 25."""


class SpawnProgress:
    """Messages of one spawn. Any thread may write them; they are read on an event loop."""

    def __init__(self) -> None:
        self._events: list[tuple[int, bool, dict[str, Any]]] = []
        """Each message's number, whether it can be replaced, and the event for the page."""
        self._readers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        """The event that wakes each reader, and the loop on which the reader waits."""
        self._writing = threading.Lock()
        self._number = 0
        self._last = 0
        self._closed = False

    def close(self) -> None:
        """Let everybody go who follows: another spawn begins, with messages of its own."""
        with self._writing:
            self._closed = True
            self._wake()

    def say(
        self,
        message: str,
        percent: int | None = None,
        *,
        replaces: bool = False,
        queue: str | None = None,
    ) -> None:
        """Add a message. The progress bar never goes back.

        ``queue`` is given while the spawn waits in the queue: the card of the page, or empty.

        If ``replaces`` is set and was set for the last message, that message is dropped: a member
        who returns after hours reads only the current position in the queue.
        """
        with self._writing:
            self._last = max(self._last, percent or 0)
            if self.last == message:
                return
            if replaces and self._events and self._events[-1][1]:
                self._events.pop()
            self._number += 1
            event = {"progress": self._last, "message": message}
            if queue is not None:
                event["queue"] = queue
            self._events.append((self._number, replaces, event))
            self._wake()

    def _wake(self) -> None:
        for more, loop in self._readers.items():
            with suppress(RuntimeError):  # that loop is closed, so the reader is gone
                loop.call_soon_threadsafe(more.set)

    @property
    def last(self) -> str:
        """The newest message."""
        return str(self._events[-1][2]["message"]) if self._events else "nothing yet"

    @property
    def followed(self) -> bool:
        """True while somebody follows the messages."""
        return bool(self._readers)

    async def follow(self) -> AsyncIterator[dict[str, Any]]:
        """Yield all messages so far, then each new one, until :meth:`close`.

        Without news, an event without a message follows every :data:`SIGN` seconds: a proxy keeps
        the page's connection open when the hub is gone, and the page could not tell.
        """
        more = asyncio.Event()
        seen = 0
        with self._writing:
            self._readers[more] = asyncio.get_running_loop()
        try:
            while not self._closed:
                more.clear()
                for number, _, event in list(self._events):
                    if number > seen:
                        seen = number
                        yield event
                try:
                    await within(SIGN, more.wait())
                except asyncio.TimeoutError:
                    yield {"progress": self._last}
        finally:
            with self._writing:
                del self._readers[more]


SAY_EVERY = 0.5
"""Seconds between two messages about one pull."""


class Pulls:
    """The pulls of one hub. An image is pulled once, however many spawns wait for it."""

    def __init__(self, connect: Connect, at_once: int = 4) -> None:
        self._connect = connect
        self._turns = asyncio.Semaphore(at_once)
        self._running: dict[str, asyncio.Future[None]] = {}
        self._listeners: dict[str, list[Callable[[str], None]]] = {}

    async def pull(self, image: str, say: Callable[[str], None]) -> None:
        """Pull ``image`` and report its progress to ``say``, in a thread. Raises StartFailed.

        A member who stops waiting does not stop the pull, so that the next one can use the image.
        """
        listeners = self._listeners.setdefault(image, [])
        listeners.append(say)
        if image not in self._running:
            self._running[image] = asyncio.ensure_future(self._in_turn(partial(self._pull, image)))
            self._running[image].add_done_callback(lambda done: self._finished(image, done))
        try:
            await asyncio.shield(self._running[image])
        finally:
            listeners.remove(say)

    async def _in_turn(self, work: Callable[[], None]) -> None:
        async with self._turns:
            await _in_daemon_thread(work)

    def _finished(self, image: str, done: asyncio.Future[None]) -> None:
        self._running.pop(image, None)
        if not done.cancelled():
            done.exception()  # mark it as retrieved, since nobody may be waiting any more

    def _pull(self, image: str) -> None:
        try:
            for message in sentences(image, pull(self._connect, image)):
                for say in list(self._listeners[image]):
                    say(message)
        except ImageUnavailable as error:
            why = error.fields["why"]
            raise StartFailed(cause=f"the image {image} could not be pulled ({why})") from error


def _in_daemon_thread(work: Callable[[], None]) -> asyncio.Future[None]:
    """Run ``work`` in a thread that does not delay the hub's exit, because pulls take long."""
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            work()
        except Exception as error:  # passed on to the waiting spawn
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="gpuspawner-pull", daemon=True).start()
    return asyncio.wrap_future(done)


def sentences(
    image: str, progress: Iterator[PullProgress], clock: Callable[[], float] = time.monotonic
) -> Iterator[str]:
    """Yield a few sentences about the progress of a pull."""
    said_at = 0.0
    for now in progress:
        if clock() - said_at >= SAY_EVERY:
            said_at = clock()
            yield sentence(image, now)
    yield f"The image {image} is here"


def sentence(image: str, now: PullProgress) -> str:
    """Format the progress of a pull for people."""
    amount = f", {now.got / 1e6:.0f} of {now.size / 1e6:.0f} MB" if now.size else ""
    return f"Pulling {image}: {now.done} of {now.layers} layers{amount}"


def local_time(moment: datetime, now: datetime) -> Markup:
    """Format a time for a page, whose script writes it in the browser's own zone.

    Both are rounded up to the minute: the script writes hours and minutes of what it is given.
    """
    at = minute_after(moment).isoformat(timespec="seconds")
    return Markup('<time datetime="{}">{}</time>').format(at, zoned(moment, now))


def _with_local_times(error: GPUSpawnerError) -> str:
    """Return a refusal's sentence, as Markup if it says when the start is expected."""
    known = error.fields
    if (outlook := known.get("outlook")) and (start := outlook.start(known["now"], local_time)):
        sentence = Markup("{} Expected start in the queue: {}. {}")
        return sentence.format(known["summary"], start, known["advice"])
    return error.message


class FailedSpawn(SpawnException):
    """A spawn that failed or was refused, with the domain error that says why.

    JupyterHub shows the error's sentence, never a traceback.
    """

    def __init__(self, error: GPUSpawnerError) -> None:
        super().__init__(error.message, reason=error.reason, status_code=error.status_code)
        self.error = error
        self.sentence = _with_local_times(error)
        self.links: Mapping[str, str] = {}
        """What the member can do now: queries of links to the form, by name."""
        # JupyterHub's names. Without the first, its pages show the exception's own text.
        self.jupyterhub_message = error.message
        self.jupyterhub_html_message = ""


class RefusalFilter(logging.Filter):
    """Keeps tracebacks of ordinary refusals out of the Hub's log.

    JupyterHub logs every exception of a form with its traceback. When a spawn is refused after the
    Hub has answered, nobody awaits that task any more, and asyncio reports its exception as well.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop the traceback of a refusal, and what asyncio says about one."""
        found = record.exc_info[1] if record.exc_info else None
        if found is None:
            record.exc_info = None  # JupyterHub 5 logs an empty traceback with a failed start
        if isinstance(found, FailedSpawn) and isinstance(found.error, Refused):
            if record.name == "asyncio":
                return False
            record.msg, record.args = f"{record.getMessage()}: {found}", ()
            record.exc_info = record.exc_text = None
        return True
