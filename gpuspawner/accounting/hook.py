"""The admin's own commands: run for a notice, for the end of a session, for low credits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Sequence
from datetime import timezone

from ..errors import Unavailable
from ..model import Notice
from ..patience import within

AT_ONCE = 4
"""Runs of one command that go on at the same time; others wait for one of them."""

SHOWN = 300
"""Characters of what a failed command wrote that its error repeats."""

READ = 64 * 1024
_PRIVATE = ("JUPYTERHUB_", "GPUSPAWNER_")
"""Variables of the service that are not the command's business: tokens and database URLs."""


class Hook:
    """A command of the admin's, run beside everything else; what goes wrong is logged."""

    def __init__(
        self, command: Sequence[str], seconds: float, log: logging.Logger, setting: str
    ) -> None:
        """``setting`` is what it is called in the configuration. No command: nothing is run."""
        self.command = tuple(command)
        self.seconds = seconds
        self.log = log
        self.setting = setting
        self._running: set[asyncio.Task[None]] = set()
        self._gate = asyncio.Semaphore(AT_ONCE)

    def start(self, text: bytes) -> None:
        """Run it with the text on its standard input; do not wait for its end."""
        if self.command:
            task = asyncio.ensure_future(self._run(text))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """End what runs still."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, text: bytes) -> None:
        async with self._gate:
            try:
                await run(self.command, text, self.seconds)
            except Unavailable as error:
                self.log.warning("%s: %s", self.setting, error)
            except Exception:
                self.log.exception("%s", self.setting)


async def run(command: Sequence[str], text: bytes, seconds: float) -> None:
    """Run the command with the text on its standard input.

    Raises Unavailable when it cannot be started, fails, or is not done in time; then it and
    whatever it started is killed.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_PRIVATE)}
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=kept,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise Unavailable(f"The hook {command[0]} cannot be started: {error}") from None
    try:
        said = await within(seconds, _talk(process, text))
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if isinstance(error, asyncio.TimeoutError):
            raise Unavailable(f"The hook was not done in {seconds:g} s and was killed.") from None
        raise
    if process.returncode:
        raise Unavailable(f"The hook ended with {process.returncode}: {said or 'it said nothing'}")


def as_json(notice: Notice) -> bytes:
    """A notice as the command reads it: one JSON object and a line end."""
    told = {
        "key": notice.key,
        "user": notice.user,
        "kind": notice.kind.value,
        "title": notice.title,
        "body": notice.body,
        "at": notice.at.astimezone(timezone.utc).isoformat(timespec="milliseconds"),
    }
    return json.dumps(told).encode() + b"\n"


async def _talk(process: asyncio.subprocess.Process, text: bytes) -> str:
    """Give it its input and wait for its end; what it wrote as an error, in short."""
    assert process.stdin and process.stderr
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it need not read
        process.stdin.write(text)
        await process.stdin.drain()
        process.stdin.close()
    said = await process.stderr.read(READ)
    while await process.stderr.read(READ):
        pass
    await process.wait()
    return " ".join(said.decode("utf-8", "replace").split())[:SHOWN]
