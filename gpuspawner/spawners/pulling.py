"""Pull images away from the thread that everybody's servers are polled on, with progress."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from ..engines.pulls import Connect, Progress, pull
from ..errors import ImageUnavailable, StartFailed

SAY_EVERY = 0.5
"""Seconds between two messages about one pull."""


class Pulls:
    """The pulls of one hub: an image is pulled once, whoever waits for it."""

    def __init__(self, connect: Connect, at_once: int = 4) -> None:
        self._connect = connect
        self._turns = asyncio.Semaphore(at_once)
        self._running: dict[str, asyncio.Future[None]] = {}
        self._listeners: dict[str, list[Callable[[str], None]]] = {}

    async def pull(self, image: str, say: Callable[[str], None]) -> None:
        """Pull ``image``; ``say`` hears how far it is. Raises StartFailed.

        A member who stops waiting does not stop the pull: the next one profits.
        """
        listeners = self._listeners.setdefault(image, [])
        listeners.append(say)
        if image not in self._running:
            tell = self._tell(image, asyncio.get_running_loop())
            work = partial(self._pull, image, tell)
            running = asyncio.ensure_future(self._in_turn(work))
            running.add_done_callback(lambda done: self._finished(image, done))
            self._running[image] = running
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
            done.exception()  # heard, even if nobody waits any more

    def _tell(self, image: str, loop: asyncio.AbstractEventLoop) -> Callable[[str], None]:
        def to_all(message: str) -> None:
            for say in self._listeners.get(image, []):
                say(message)

        def tell(message: str) -> None:
            with contextlib.suppress(RuntimeError):  # the hub has ended
                loop.call_soon_threadsafe(to_all, message)

        return tell

    def _pull(self, image: str, tell: Callable[[str], None]) -> None:
        try:
            for message in sentences(image, pull(self._connect, image)):
                tell(message)
        except ImageUnavailable as error:
            why = error.fields["why"]
            raise StartFailed(cause=f"the image {image} could not be pulled ({why})") from error


def _in_daemon_thread(work: Callable[[], None]) -> asyncio.Future[None]:
    """Run ``work`` in a thread that a hub does not wait for when it ends: pulls take long."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish(error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error: Exception | None = None
        try:
            work()
        except Exception as raised:  # whatever it is, the waiting spawn hears it
            error = raised
        with contextlib.suppress(RuntimeError):  # the hub has ended
            loop.call_soon_threadsafe(finish, error)

    threading.Thread(target=run, name="gpuspawner-pull", daemon=True).start()
    return done


def sentences(
    image: str, progress: Iterator[Progress], clock: Callable[[], float] = time.monotonic
) -> Iterator[str]:
    """How far a pull is, as a few sentences."""
    said_at = 0.0
    for now in progress:
        if clock() - said_at >= SAY_EVERY:
            said_at = clock()
            yield sentence(image, now)
    yield f"The image {image} is here"


def sentence(image: str, now: Progress) -> str:
    """How far a pull is, for people."""
    amount = f", {now.got / 1e6:.0f} of {now.size / 1e6:.0f} MB" if now.size else ""
    return f"Pulling {image}: {now.done} of {now.layers} layers{amount}"
