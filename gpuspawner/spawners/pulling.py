"""Pull images away from the thread that everybody's servers are polled on, with progress."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import docker

from ..errors import StartFailed

SAY_EVERY = 0.5
"""Seconds between two messages about one pull."""


class Pulls:
    """The pulls of one hub: an image is pulled once, whoever waits for it."""

    def __init__(self, connect: Callable[[], docker.APIClient], at_once: int = 4) -> None:
        self._connect = connect
        self._turns = asyncio.Semaphore(at_once)
        self._running: dict[str, asyncio.Future[None]] = {}
        self._listeners: dict[str, list[Callable[[str], None]]] = {}

    async def pull(self, repository: str, tag: str, say: Callable[[str], None]) -> None:
        """Pull ``repository:tag``; ``say`` hears how far it is. Raises StartFailed.

        A member who stops waiting does not stop the pull: the next one profits.
        """
        image = f"{repository}:{tag}"
        listeners = self._listeners.setdefault(image, [])
        listeners.append(say)
        if image not in self._running:
            tell = self._tell(image, asyncio.get_running_loop())
            work = partial(self._pull, repository, tag, tell)
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

    def _pull(self, repository: str, tag: str, tell: Callable[[str], None]) -> None:
        client = self._connect()
        try:
            stream = client.pull(repository, tag, stream=True, decode=True)
            for message in layers(f"{repository}:{tag}", stream):
                tell(message)
        except docker.errors.APIError as error:
            cause = f"the image {repository}:{tag} could not be pulled ({error.explanation})"
            raise StartFailed(cause=cause) from error
        finally:
            client.close()


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


def split_image(image: str) -> tuple[str, str]:
    """Repository and tag (or digest); a port in the registry's name is no tag."""
    if "@" in image:
        repository, _, digest = image.partition("@")
        return repository, digest
    if ":" in image.rpartition("/")[2]:
        repository, _, tag = image.rpartition(":")
        return repository, tag
    return image, "latest"


def layers(
    image: str, stream: Iterator[dict[str, Any]], clock: Callable[[], float] = time.monotonic
) -> Iterator[str]:
    """Docker's pull messages as a few sentences. Raises StartFailed when it says an error."""
    total: set[str] = set()
    done: set[str] = set()
    downloading: dict[str, tuple[int, int]] = {}
    said_at = 0.0
    for event in stream:
        if "error" in event:
            cause = f"the image {image} could not be pulled ({event['error']})"
            raise StartFailed(cause=cause)
        layer, status = event.get("id", ""), event.get("status", "")
        if not layer or status.startswith("Pulling from"):
            continue
        total.add(layer)
        if status in ("Pull complete", "Already exists"):
            done.add(layer)
        detail = event.get("progressDetail") or {}
        if status == "Downloading" and detail.get("total"):
            downloading[layer] = (detail["current"], detail["total"])
        if clock() - said_at >= SAY_EVERY:
            said_at = clock()
            yield _sentence(image, len(done), len(total), downloading)
    yield f"The image {image} is here"


def _sentence(image: str, done: int, total: int, downloading: dict[str, tuple[int, int]]) -> str:
    got = sum(current for current, _ in downloading.values()) / 1e6
    size = sum(whole for _, whole in downloading.values()) / 1e6
    amount = f", {got:.0f} of {size:.0f} MB" if size else ""
    return f"Pulling {image}: {done} of {total} layers{amount}"
