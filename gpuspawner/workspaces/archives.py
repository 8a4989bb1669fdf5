"""Archives of workspaces: one compressed tar each, whole under its name or not there at all."""

from __future__ import annotations

import contextlib
import gzip
import os
import subprocess
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from ..errors import ArchiveRefused

CHUNK = 1 << 20
ENDINGS = (".tar.zst", ".tar.gz", ".tar")
"""What an archive's name may end with. Of .tar.zst the command zstd makes and reads the rest."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What is in an archive."""

    entries: int
    size: int
    """Bytes of all files together."""
    top: tarfile.TarInfo | None = None
    """The workspace itself: its owner and mode."""


def ending(file: Path) -> str:
    """How an archive is compressed, by its name. Raises ArchiveRefused."""
    for known in ENDINGS:
        if file.name.endswith(known):
            return known
    raise ArchiveRefused(what=f"{file.name} ends in none of {', '.join(ENDINGS)}")


def write_archive(tar: Iterable[bytes], file: Path) -> Contents:
    """Write a tar into a new file of mode 600, prove it, and give it its name.

    Raises ArchiveRefused; then there is no such file.
    """
    kind = ending(file)
    if file.exists():
        raise ArchiveRefused(what=f"{file} is there already: name another file")
    part = file.with_name(f".{os.getpid()}.{file.name}")
    try:
        descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            _compress(tar, out, kind)
            out.flush()
            os.fsync(out.fileno())
        found = check_archive(part)
        os.link(part, file)  # unlike a rename, it replaces nothing
        return found
    except OSError as error:
        raise ArchiveRefused(what=f"{file}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def check_archive(file: Path) -> Contents:
    """Read an archive to its end. Raises ArchiveRefused for one that is damaged, cut short, or
    holds anything that could leave the workspace that it is put into."""
    entries = size = 0
    top: tarfile.TarInfo | None = None
    try:
        chunks: Any = _Readable(read_archive(file))
        with chunks, tarfile.open(fileobj=chunks, mode="r|") as tar:
            for entry in tar:
                _must_stay_inside(entry, file)
                entries += 1
                size += entry.size
                if PurePosixPath(entry.name) == PurePosixPath("."):
                    top = entry
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ArchiveRefused(what=f"{file} is damaged or cut short ({error})") from error
    except OSError as error:
        raise ArchiveRefused(what=f"{file}: {error.strerror or error}") from error
    if not entries:
        raise ArchiveRefused(what=f"{file} is damaged or cut short (nothing is in it)")
    return Contents(entries, size, top)


def read_archive(file: Path) -> Iterator[bytes]:
    """The tar in an archive, chunk by chunk. Raises OSError, EOFError and zlib.error for what
    cannot be read, and ArchiveRefused."""
    kind = ending(file)
    if kind == ".tar.zst":
        yield from _read_zstd(file)
        return
    opener: Any = gzip.open if kind == ".tar.gz" else open
    with opener(file, "rb") as stream:
        while chunk := stream.read(CHUNK):
            yield chunk


def _must_stay_inside(entry: tarfile.TarInfo, file: Path) -> None:
    path = PurePosixPath(entry.name)
    if path.is_absolute() or ".." in path.parts:
        raise ArchiveRefused(what=f"{file} holds {entry.name[:100]!r}, which leads out of it")
    link = PurePosixPath(entry.linkname)
    if entry.islnk() and (link.is_absolute() or ".." in link.parts):
        raise ArchiveRefused(what=f"{file} holds {entry.name[:100]!r}, a link that leads out of it")
    if entry.isdev() and not entry.isfifo():
        raise ArchiveRefused(what=f"{file} holds {entry.name[:100]!r}, which is a device")


def _compress(tar: Iterable[bytes], out: IO[bytes], kind: str) -> None:
    if kind == ".tar.zst":
        _write_zstd(tar, out)
        return
    with contextlib.ExitStack() as stack:
        target: Any = out
        if kind == ".tar.gz":
            target = stack.enter_context(gzip.GzipFile(fileobj=out, mode="wb", compresslevel=6))
        for chunk in tar:
            target.write(chunk)


def _zstd(*words: str, **pipes: Any) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(["zstd", "-q", "-c", *words], stderr=subprocess.PIPE, **pipes)
    except FileNotFoundError:
        raise ArchiveRefused(
            what="there is no zstd on this machine; install it, or name a .tar.gz"
        ) from None


def _write_zstd(tar: Iterable[bytes], out: IO[bytes]) -> None:
    process = _zstd("-T0", stdin=subprocess.PIPE, stdout=out)
    assert process.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            for chunk in tar:
                process.stdin.write(chunk)
        process.stdin.close()
    except BaseException:
        process.kill()
        raise
    finally:
        code = process.wait()
    if code:
        said = process.stderr.read().decode(errors="replace") if process.stderr else ""
        raise ArchiveRefused(what=f"zstd says: {said.strip()[:200]}")


def _read_zstd(file: Path) -> Iterator[bytes]:
    process = _zstd("-d", str(file), stdout=subprocess.PIPE)
    assert process.stdout is not None
    ended = False
    try:
        while chunk := process.stdout.read(CHUNK):
            yield chunk
        ended = True
    finally:
        if not ended:
            process.kill()
        code = process.wait()
    if code:
        raise EOFError("zstd cannot read it")


class _Readable:
    """Chunks as something that tarfile can read."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._left = b""

    def __enter__(self) -> _Readable:
        return self

    def __exit__(self, *_: object) -> None:
        close = getattr(self._chunks, "close", None)
        if close:
            close()

    def read(self, size: int = -1) -> bytes:
        """At most so many bytes; none at the end."""
        while size < 0 or len(self._left) < size:
            chunk = next(self._chunks, b"")
            if not chunk:
                break
            self._left += chunk
        size = len(self._left) if size < 0 else size
        found, self._left = self._left[:size], self._left[size:]
        return found
