"""Calls to a server's container engine, made in threads so that none blocks another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import docker
from docker.errors import DockerException

from ..engines.injection import HELPER

T = TypeVar("T")

ENGINE_ERRORS = (DockerException, OSError)
"""What a call raises if the engine refuses it or does not answer (requests raises OSError)."""

FRESH_SECONDS = 2.0
"""Maximum age in seconds of an engine's answer that was requested ahead of its use."""

THREADS = 16
"""Docker calls that may run at once; DockerSpawner alone has one thread for all members."""


def make_threads() -> ThreadPoolExecutor:
    """Return a thread pool for the Docker calls of one hub."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="gpuspawner-docker")


@dataclass(slots=True)
class EngineCalls:
    """The engine calls of one server's spawner."""

    call: Callable[..., Awaitable[Any]]
    _client: Callable[[], docker.APIClient]
    """Returns the client, which depends on the server's node."""
    _threads: Callable[[], ThreadPoolExecutor]

    @property
    def client(self) -> docker.APIClient:
        """The client of the engine that the server is on."""
        return self._client()

    async def ask(self, question: Callable[..., T], *args: Any) -> T:
        """Run a blocking engine query in the thread pool and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._threads(), question, *args)

    async def run_helper(
        self, command: list[str], *, image: str, **host_config: Any
    ) -> tuple[int, str]:
        """Run a command as root in a throw-away container without network.

        Returns its exit code and output. ``host_config`` takes Engine API names.
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


class PrefetchedAnswer:
    """A query that starts before its answer is needed, in parallel with others."""

    def __init__(self, question: Callable[[], Coroutine[Any, Any, str]]) -> None:
        self._question = question
        self._asked: tuple[float, asyncio.Task[str]] | None = None
        """When the query started, and its task."""

    def ask(self) -> None:
        """Start the query."""
        asked = asyncio.ensure_future(self._question())
        # Mark its exception as retrieved, since nobody may take the answer.
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._asked = time.monotonic(), asked

    async def take(self) -> str:
        """Return the answer; query again if it was not requested or is older than FRESH_SECONDS."""
        asked, self._asked = self._asked, None
        if asked is None or time.monotonic() - asked[0] > FRESH_SECONDS:
            return await self._question()
        return await asked[1]


def explanation(error: Exception) -> str:
    """Return the engine's reason for a refusal, in one line."""
    text = getattr(error, "explanation", None) or str(error)
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return "the container engine refused it: " + " ".join(str(text).split())[:300]
