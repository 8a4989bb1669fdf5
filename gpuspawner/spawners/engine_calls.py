"""Calls to the container engine that a server is on; none of them blocks another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import docker

from ..engines.injection import HELPER

T = TypeVar("T")

FRESH_SECONDS = 2.0
"""For so long an answer of the engine is used that was asked for ahead of its use."""

THREADS = 16
"""Docker calls that may run at once; the stock spawner has one thread for all members."""


def make_threads() -> ThreadPoolExecutor:
    """The threads for the Docker calls of one hub."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="gpuspawner-docker")


class EngineCalls:
    """The calls of one server's spawner."""

    def __init__(
        self,
        call: Callable[..., Awaitable[Any]],
        client: Callable[[], docker.APIClient],
        threads: Callable[[], ThreadPoolExecutor],
    ) -> None:
        """``call`` is DockerSpawner's own ``docker``; the client changes with the server's node."""
        self.call = call
        self._client = client
        self._threads = threads

    @property
    def client(self) -> docker.APIClient:
        """The client of the engine that the server is on."""
        return self._client()

    async def ask(self, question: Callable[..., T], *args: Any) -> T:
        """Run a blocking question to the engine in one of the threads for it."""
        return await asyncio.get_running_loop().run_in_executor(self._threads(), question, *args)

    async def run_helper(
        self, command: list[str], *, image: str, **host_config: Any
    ) -> tuple[int, str]:
        """Run a command as root in a throw-away container, without network.

        Its exit code and what it printed. ``host_config`` takes the Engine API's names.
        """
        created = await self.call(
            "create_container",
            image=image,
            entrypoint=command,
            command=[],
            user="0",
            environment={"NVIDIA_VISIBLE_DEVICES": "void"},
            host_config={"NetworkMode": "none", **HELPER, **host_config},
        )
        try:
            await self.call("start", created["Id"])
            code = (await self.call("wait", created["Id"]))["StatusCode"]
            words = await self.call("logs", created["Id"], tail=20)
            return int(code), words.decode(errors="replace").strip()
        finally:
            await self.call("remove_container", created["Id"], force=True)


class AskedAhead:
    """A question whose answer is needed soon, asked beside others."""

    def __init__(self, question: Callable[[], Coroutine[Any, Any, str]]) -> None:
        self._question = question
        self._asked: tuple[float, asyncio.Task[str]] | None = None
        """When, and what comes of it."""

    def ask(self) -> None:
        """Begin to ask."""
        asked = asyncio.ensure_future(self._question())
        asked.add_done_callback(_ignore_failure)
        self._asked = time.monotonic(), asked

    async def take(self) -> str:
        """The answer, asked for anew when it was not asked for, or long ago."""
        asked, self._asked = self._asked, None
        if asked is None or time.monotonic() - asked[0] > FRESH_SECONDS:
            return await self._question()
        return await asked[1]


def _ignore_failure(asked: asyncio.Future[str]) -> None:
    """Take the failure of a question whose answer nobody may come for."""
    if not asked.cancelled():
        asked.exception()


def explanation(error: Exception) -> str:
    """What the engine says of a refusal, in one line."""
    text = getattr(error, "explanation", None) or str(error)
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return "the container engine refused it: " + " ".join(str(text).split())[:300]
