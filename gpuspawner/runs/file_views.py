"""The log and the files of runs, as the REST API sends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from pydantic import WithJsonSchema
from tornado import web
from tornado.iostream import StreamClosedError

from ..core.errors import EngineUnavailable, GPUSpawnerError, NoRunFiles, UnknownRun
from ..core.scopes import SESSION
from ..web.api import APIHandler, Parameter, operation, refusals
from ..web.base import ServiceHandler
from ..web.fields import invalid, one_of
from .files import FilePart, RunFiles, SentFile
from .models import FollowedRun, RunRecord
from .schemas import RunFilesAnswer

T = TypeVar("T")

MOST_AT_ONCE = 1 << 20
"""Bytes of a log in one answer, and in one part of a stream."""

RECORD_PATIENCE = 3.0
"""Seconds to wait for a notebook's progress. Nothing else needs the engine."""

PAUSE = 1.0
"""Seconds between two looks at a log that is followed."""

SHARE = 10
"""A pause is this many times as long as the last read, so that a long log costs no more."""

LONGEST_STREAM_SECONDS = 3600.0
"""Seconds after which a stream ends; the client can ask for more."""

FARTHEST = 2**53
_OFFSET = {"type": "integer", "minimum": -FARTHEST, "maximum": FARTHEST, "default": 0}
OFFSET = Parameter("offset", _OFFSET, "The first byte; below 0: bytes before the end.")
FOLLOW = Parameter("follow", {"enum": ["0", "1"]}, "1: continue until the run ends.")

NEXT = "X-Next-Offset"
"""The header with the offset at which the next answer begins."""

Text = Annotated[str, WithJsonSchema({"type": "string"})]
Binary = Annotated[str, WithJsonSchema({"type": "string", "format": "binary"})]


def require_own(
    handler: ServiceHandler, owner: str, unknown: GPUSpawnerError, *, or_admin: bool = True
) -> None:
    """Raise HTTPError 404 unless the user is the owner, or with ``or_admin`` an admin.

    The error is ``unknown``, so that nobody learns whether others have such a thing.
    """
    if owner != handler.user and not (or_admin and handler.admin):
        raise web.HTTPError(404) from unknown


async def own_run(handler: ServiceHandler, run_id: str) -> FollowedRun:
    """Return a run of the user's, or any for an admin. Raises HTTPError."""
    found: FollowedRun = await handler.read(handler.services.runs.get, run_id)
    require_own(handler, found.run.user, UnknownRun(run=run_id))
    return found


def files_of(handler: ServiceHandler) -> RunFiles:
    """Return the reader of run files. Raises NoRunFiles."""
    if handler.context.run_files is None:
        raise NoRunFiles(why="this service reads none")
    return handler.context.run_files


async def record_of(handler: ServiceHandler, followed: FollowedRun) -> RunRecord:
    """Return what a run recorded about itself; empty if that cannot be read now."""
    try:
        files = files_of(handler)
        return await asyncio.wait_for(files.call(files.record, followed), RECORD_PATIENCE)
    except (GPUSpawnerError, asyncio.TimeoutError):
        return RunRecord()


class _FileAPI(APIHandler):
    for_servers = True
    _gone: asyncio.Event | None = None

    def on_connection_close(self) -> None:
        """End the stream whose client went away."""
        super().on_connection_close()
        if self._gone is not None:
            self._gone.set()

    async def outside(self, work: Callable[..., T], *args: Any) -> T:
        """Call a method of :class:`RunFiles`. Raises HTTPError."""
        with refusals():
            return await files_of(self).call(work, *args)

    def begin(self, media: str) -> None:
        """Set the headers of content that a member wrote."""
        self.set_header("Content-Type", media)
        self.set_header("Content-Security-Policy", "default-src 'none'; sandbox")

    async def send_part(self, data: bytes, until: float) -> bool:
        """Send a part, and wait until the client has received it.

        Returns False if it disconnects, or takes longer than ``until``, by the event loop's clock.
        """
        self.write(data)
        try:
            await asyncio.wait_for(self.flush(), until - asyncio.get_running_loop().time())
        except StreamClosedError:
            return False
        except asyncio.TimeoutError:
            self.break_off()
            return False
        return True

    def break_off(self) -> None:
        """Close the connection of an answer that cannot be completed: its length would be wrong."""
        self.detach().close()


class RunLogAPI(_FileAPI):
    """What a run printed."""

    @operation(
        "runs/{run}/log", Text, OFFSET, FOLLOW, name="runLog", scope=SESSION, media="text/plain"
    )
    @web.authenticated
    async def get(self, run_id: str) -> None:
        """Return up to 1 MiB of a run's log, from a byte on.

        The header ``X-Next-Offset`` says where the next answer begins; without it, the log is
        complete. With ``follow=1`` the answer continues until the run ends, for an hour at most.
        """
        offset = _offset(self.get_query_argument("offset", "0"))
        follow = one_of(self.get_query_argument("follow", "0"), "follow", ("0", "1")) == "1"
        followed = await own_run(self, run_id)
        with refusals():
            files = files_of(self)
        part = await self.outside(files.log, followed, offset, MOST_AT_ONCE)
        if not follow:
            self.begin("text/plain; charset=utf-8")
            if part.end < part.size or not followed.run.outcome:
                self.set_header(NEXT, str(part.end))
            self.finish(part.data)
            return
        with refusals(), files.stream(self.user):
            self.begin("text/plain; charset=utf-8")
            await self._follow(files, followed, part)

    async def _follow(self, files: RunFiles, followed: FollowedRun, part: FilePart) -> None:
        clock = asyncio.get_running_loop().time
        until, took = clock() + LONGEST_STREAM_SECONDS, 0.0
        self._gone = asyncio.Event()
        while await self.send_part(part.data, until):
            if part.end >= part.size:
                if followed.run.outcome:
                    return
                try:
                    await asyncio.wait_for(self._gone.wait(), max(PAUSE, SHARE * took))
                    return
                except asyncio.TimeoutError:
                    pass
            began = clock()
            try:
                # In this order, so that the log has all that was printed before the end.
                followed = await self.services.read(self.services.runs.get, followed.run.id)
                part = await files.call(files.log, followed, part.end, MOST_AT_ONCE)
            except EngineUnavailable:
                part = FilePart(b"", part.end, part.end)
            except GPUSpawnerError:
                return
            took = clock() - began


class RunFilesAPI(_FileAPI):
    """The files in a run's folder."""

    @operation("runs/{run}/files", RunFilesAnswer, name="runFiles", scope=SESSION)
    @web.authenticated
    async def get(self, run_id: str) -> None:
        """List the files in a run's folder, up to 1,000, as the run itself last listed them."""
        followed = await own_run(self, run_id)
        with refusals():
            files = files_of(self)
        record = await self.outside(files.record, followed)
        self.answer(RunFilesAnswer, files=[{"path": p, "size": n} for p, n in record.files.items()])


class RunFileAPI(_FileAPI):
    """One file of a run."""

    @operation(
        "runs/{run}/files/{file}",
        Binary,
        name="runFile",
        scope=SESSION,
        media="application/octet-stream",
    )
    @web.authenticated
    async def get(self, run_id: str, path: str) -> None:
        """Send a file of a run's folder."""
        followed = await own_run(self, run_id)
        with refusals():
            files = files_of(self)
            with files.stream(self.user):
                file = await files.call(files.send, followed, path)
                try:
                    await self._send(files, file, path)
                finally:
                    await files.call(file.close)

    async def _send(self, files: RunFiles, file: SentFile, path: str) -> None:
        clock = asyncio.get_running_loop().time
        until = clock() + LONGEST_STREAM_SECONDS
        self.begin("application/octet-stream")
        name = quote(path.rpartition("/")[2], safe="")
        self.set_header("Content-Disposition", f"attachment; filename*=UTF-8''{name}")
        self.set_header("Content-Length", str(file.size))
        left = file.size
        while left:
            try:
                data = await files.call(file.read)
            except EngineUnavailable:
                data = b""
            if not data:
                self.break_off()
                return
            left -= len(data)
            if not await self.send_part(data, until):
                return


def _offset(text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 16):
        raise web.HTTPError(400) from invalid("offset", "is a whole number.")
    offset = int(text)
    if abs(offset) > FARTHEST:
        raise web.HTTPError(400) from invalid("offset", "is a whole number.")
    return offset


HANDLERS = [
    (r"api/runs/([0-9a-z-]{1,64})/log", RunLogAPI),
    (r"api/runs/([0-9a-z-]{1,64})/files", RunFilesAPI),
    (r"api/runs/([0-9a-z-]{1,64})/files/(.{1,2000})", RunFileAPI),
]
