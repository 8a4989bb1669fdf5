"""The files of runs, read through the engine that has their workspaces.

A run's files are in the newest workspace of its member that has them. The database says which
workspaces these are; a request cannot.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from ..core.errors import (
    EngineUnavailable,
    GPUSpawnerError,
    NoRunFile,
    NoRunFiles,
    TooManyStreams,
    WorkspaceBusy,
)
from ..core.units import format_bytes
from ..engines.base import Engine, EngineWithFiles
from ..engines.files import CHUNK, MountedWorkspace, NotRegular
from ..storage.service import StorageService
from .models import FollowedRun, RunRecord
from .rules import NO_RECORD, is_file_name, read_record

T = TypeVar("T")

RECORD, LOG, OUTPUT = "run.json", "run.log", "output.ipynb"

LARGEST_RECORD = 1 << 20
LARGEST_LOG = 512 << 20
"""The end of a log is found by reading all of it, so a longer log is not shown."""

IDLE_SECONDS = 30.0
"""Seconds after which a mount that nobody uses is removed."""

LOCK_SECONDS = 10.0
"""Seconds to wait for other readers of the same workspace: their engine may hang."""

RECORD_SECONDS = 2.0
"""Seconds for which a record is kept and used again."""

MOST_STREAMS, MOST_STREAMS_EACH = 40, 4
"""How many logs and files are sent at once, to all members and to each."""

THREADS = 8

LEFTOVERS_EVERY = 3600.0
"""Seconds between two searches for containers that a killed process left."""

MOST_WORKSPACES = 3
"""How many of a member's workspaces are searched."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a file, in bytes."""

    data: bytes
    start: int
    size: int
    """The size of the whole file."""

    @property
    def end(self) -> int:
        """Where the next part starts."""
        return self.start + len(self.data)


NOTHING = FilePart(b"", 0, 0)


@dataclass(eq=False, slots=True)
class _KeptMount:
    lock: threading.Lock = field(default_factory=threading.Lock)
    """The engine reads one file at a time through a container."""
    mount: MountedWorkspace | None = None
    users: int = 0
    used_at: float = 0.0


class SentFile:
    """A file with a mount of its own, so that a slow reader delays nobody else."""

    def __init__(self, mount: MountedWorkspace, path: str) -> None:
        """Open a file that closes the mount with it. Raises like :meth:`MountedWorkspace.open`."""
        with ExitStack() as stack:
            stack.callback(mount.close)
            self._file = stack.enter_context(mount.open(path))
            self.close = stack.pop_all().close
        self.size = self._file.size

    def read(self) -> bytes:
        """Return the next part; empty at the end. Raises EngineUnavailable."""
        return self._file.read(CHUNK)


class RunFiles:
    """Reads the files of runs. Synchronous methods block and are thread-safe: see `call`."""

    def __init__(self, storage: StorageService, engines: Mapping[str, Engine]) -> None:
        self._storage = storage
        self._engines = engines
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str], _KeptMount] = {}
        self._records: dict[str, tuple[float, RunRecord]] = {}
        self._streams: Counter[str] = Counter()
        self._leftovers_at = 0.0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="gpuspawner-files")

    def part(
        self, followed: FollowedRun, name: str, start: int, most: int, *, largest: int = LARGEST_LOG
    ) -> FilePart:
        """Return at most ``most`` bytes of a file from ``start``; below zero, from its end.

        Raises NoRunFile, NoRunFiles, WorkspaceBusy or EngineUnavailable.
        """

        def read(engine: EngineWithFiles, source: str, path: str) -> FilePart:
            with self._mount(engine, source) as mount, mount.open(path) as file:
                if file.size > largest:
                    size = format_bytes(file.size)
                    raise NoRunFiles(why=f"{name} has {size}; open it in your workspace")
                begin = min(start if start >= 0 else max(0, file.size + start), file.size)
                file.skip(begin)
                parts, left = [], most
                while left and (data := file.read(min(left, CHUNK))):
                    parts.append(data)
                    left -= len(data)
                return FilePart(b"".join(parts), begin, file.size)

        return self._found(followed, name, read)

    def log(self, followed: FollowedRun, start: int, most: int) -> FilePart:
        """Return a part of a run's log; empty while it has none. Raises like :meth:`part`."""
        try:
            return self.part(followed, LOG, start, most)
        except (NoRunFile, NoRunFiles):
            if followed.run.outcome:
                raise
            return NOTHING

    def record(self, followed: FollowedRun) -> RunRecord:
        """Return what a run recorded about itself; empty if there is no readable record.

        Raises NoRunFiles, WorkspaceBusy or EngineUnavailable.
        """
        run_id, now = followed.run.id, time.monotonic()
        read_at, record = self._records.get(run_id, (-RECORD_SECONDS, NO_RECORD))
        if now - read_at < RECORD_SECONDS:
            return record
        record = NO_RECORD
        with suppress(NoRunFile):
            part = self.part(followed, RECORD, 0, LARGEST_RECORD, largest=LARGEST_RECORD)
            record = read_record(part.data)
        if len(self._records) > 1000:
            self._records.clear()
        self._records[run_id] = now, record
        return record

    def send(self, followed: FollowedRun, name: str) -> SentFile:
        """Open a file of any size. Raises like :meth:`part`."""

        def open_file(engine: EngineWithFiles, source: str, path: str) -> SentFile:
            return SentFile(engine.mount_workspace(source), path)

        return self._found(followed, name, open_file)

    @contextmanager
    def stream(self, user: str) -> Iterator[None]:
        """Count one stream to a member, in the event loop. Raises TooManyStreams."""
        if self._streams[user] >= MOST_STREAMS_EACH or self._streams.total() >= MOST_STREAMS:
            raise TooManyStreams(most=self._streams[user])
        self._streams[user] += 1
        try:
            yield
        finally:
            self._streams[user] -= 1

    async def call(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a method that blocks in a thread: an engine that hangs delays nothing else."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(work, *args, **kwargs))

    async def round(self) -> None:
        """Remove the mounts that were not used lately, and those of a killed process."""
        await self.call(self._close, IDLE_SECONDS)
        if time.monotonic() >= self._leftovers_at:
            self._leftovers_at = time.monotonic() + LEFTOVERS_EVERY
            for engine in self._engines.values():
                if isinstance(engine, EngineWithFiles):
                    with suppress(EngineUnavailable):
                        await self.call(engine.remove_leftovers)

    async def close(self) -> None:
        """Remove all mounts that are not in use."""
        await self.call(self._close, 0.0)

    def _close(self, idle_seconds: float) -> None:
        since = time.monotonic() - idle_seconds
        with self._lock:
            idle = [key for key, x in self._kept.items() if not x.users and x.used_at <= since]
            closed = [self._kept.pop(key).mount for key in idle]
        for mount in closed:
            if mount is not None:
                mount.close()

    def _found(
        self, followed: FollowedRun, name: str, read: Callable[[EngineWithFiles, str, str], T]
    ) -> T:
        """Return what ``read`` returns for the first workspace that has the file."""
        if not is_file_name(name):
            raise NoRunFile(path=name)
        if followed.lease is None:
            raise NoRunFiles(why="it has not started yet")
        engine = self._engines.get(followed.lease.engine)
        known = [some for some, _ in self._storage.workspaces_of(followed.run.user)]
        if not known or not isinstance(engine, EngineWithFiles):
            raise NoRunFiles(why="this hub has no workspace of its member")
        why_not: GPUSpawnerError = NoRunFile(path=name)
        for workspace in known[:MOST_WORKSPACES]:
            if workspace.busy:
                raise WorkspaceBusy(what=workspace.busy)
            try:
                return read(engine, workspace.source, f"{followed.run.work.folder}/{name}")
            except FileNotFoundError:
                continue
            except NotRegular:
                raise NoRunFiles(why=f"{name} is not a regular file") from None
            except NoRunFiles as error:
                why_not = error
        raise why_not

    @contextmanager
    def _mount(self, engine: EngineWithFiles, source: str) -> Iterator[MountedWorkspace]:
        with self._lock:
            kept = self._kept.setdefault((engine.name, source), _KeptMount())
            kept.users += 1
        try:
            if not kept.lock.acquire(timeout=LOCK_SECONDS):
                raise EngineUnavailable()
            try:
                if kept.mount is None or not kept.mount.is_mounted():
                    kept.mount = None
                    kept.mount = engine.mount_workspace(source)
                yield kept.mount
            finally:
                kept.lock.release()
        finally:
            with self._lock:
                kept.users -= 1
                kept.used_at = time.monotonic()
