"""Directories of members: archives, trees of files, and renames.

A directory of this machine is read with GNU tar, a volume of the engine through a container that is
created and never started. Neither follows a member's symlinks.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import secrets
import shutil
import stat
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import docker
import requests
from docker.errors import APIError, DockerException, NotFound

from ..core.errors import ArchiveRefused, EngineUnavailable, Refused, WorkspaceBusy

CHUNK = 1 << 20
ENDINGS = (".tar.zst", ".tar.gz", ".tar")
"""Possible endings of an archive. For .tar.zst the command zstd is used."""


@dataclass(frozen=True, slots=True)
class ArchiveContents:
    """The contents of an archive."""

    entries: int
    size: int
    """Bytes of all files together."""
    top: tarfile.TarInfo | None = None
    """The workspace itself: its owner and mode."""


def ending(file: Path) -> str:
    """Return an archive's compression, by its name. Raises ArchiveRefused."""
    for known in ENDINGS:
        if file.name.endswith(known):
            return known
    raise ArchiveRefused(what=f"{file.name} ends in none of {', '.join(ENDINGS)}")


Watch = Callable[[Iterable[bytes]], Iterator[bytes]]
"""Passes chunks on; raises an error to stop the work on them."""


def write_archive(
    tar: Iterable[bytes],
    file: Path,
    *,
    check: Watch = iter,
    finish: Callable[[], object] = lambda: None,
) -> ArchiveContents:
    """Write a tar into a new file of mode 600, check it, then rename it to its final name.

    ``check`` watches the chunks that are read back; ``finish`` is called just before the file gets
    its name. If they raise an error, or ArchiveRefused is raised, there is no such file.
    """
    kind = ending(file)
    if file.exists():
        raise ArchiveRefused(what=f"{file} already exists: name another file")
    part = file.with_name(f".{os.getpid()}.{file.name}")
    try:
        descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            _compress(tar, out, kind)
            out.flush()
            os.fsync(out.fileno())
        found = check_archive(part, check)
        finish()
        os.link(part, file)  # unlike a rename, it replaces nothing
        return found
    except OSError as error:
        what = f"{file} could not be written. Check that its folder is writable and has space"
        raise ArchiveRefused(what, error) from error
    finally:
        part.unlink(missing_ok=True)


_DAMAGED = "{file} is damaged or cut short. Choose another archive"


def check_archive(file: Path, watch: Watch = iter) -> ArchiveContents:
    """Read an archive to its end, and return what it contains.

    Raises ArchiveRefused if it is damaged or truncated, or contains anything that could leave the
    workspace that it is restored into.
    """
    entries = size = 0
    top: tarfile.TarInfo | None = None
    chunks = read_archive(file)
    stream: Any = _Readable(watch(chunks))
    try:
        with contextlib.closing(chunks), tarfile.open(fileobj=stream, mode="r|") as tar:
            for entry in tar:
                _must_stay_inside(entry, file)
                entries += 1
                size += entry.size
                if PurePosixPath(entry.name) == PurePosixPath("."):
                    top = entry
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ArchiveRefused(_DAMAGED.format(file=file), error) from error
    except OSError as error:
        what = f"{file} could not be read. Check that it is there and who may read it"
        raise ArchiveRefused(what, error) from error
    if not entries:
        raise ArchiveRefused(_DAMAGED.format(file=file), "nothing is in it")
    return ArchiveContents(entries, size, top)


def read_archive(file: Path) -> Generator[bytes]:
    """Yield the tar in an archive, chunk by chunk.

    Raises OSError, EOFError and zlib.error if it cannot be read, and ArchiveRefused.
    """
    kind = ending(file)
    if kind == ".tar.zst":
        words = [*_zstd(), "-d", str(file)]
        try:
            yield from _output(words)
        except ArchiveRefused:
            raise EOFError("zstd cannot read it") from None
        return
    opener: Any = gzip.open if kind == ".tar.gz" else open
    with opener(file, "rb") as stream:
        while chunk := stream.read(CHUNK):
            yield chunk


def _must_stay_inside(entry: tarfile.TarInfo, file: Path) -> None:
    path = PurePosixPath(entry.name)
    if path.is_absolute() or ".." in path.parts:
        raise ArchiveRefused(what=f"{file} holds {entry.name[:100]!r}, which points outside of it")
    link = PurePosixPath(entry.linkname)
    if entry.islnk() and (link.is_absolute() or ".." in link.parts):
        raise ArchiveRefused(
            what=f"{file} holds {entry.name[:100]!r}, a link that points outside of it"
        )
    if entry.isdev() and not entry.isfifo():
        raise ArchiveRefused(what=f"{file} holds {entry.name[:100]!r}, which is a device")


def _compress(tar: Iterable[bytes], out: IO[bytes], kind: str) -> None:
    if kind == ".tar.zst":
        _feed([*_zstd(), "-T0"], tar, stdout=out)
        return
    with contextlib.ExitStack() as stack:
        target: Any = out
        if kind == ".tar.gz":
            target = stack.enter_context(gzip.GzipFile(fileobj=out, mode="wb", compresslevel=6))
        for chunk in tar:
            target.write(chunk)


def _zstd() -> tuple[str, ...]:
    if not shutil.which("zstd"):
        raise ArchiveRefused(what="there is no zstd on this machine; install it, or name a .tar.gz")
    return ("zstd", "-q", "-c")


class _Readable:
    """Chunks as a file object for tarfile."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._left = b""

    def read(self, size: int = -1) -> bytes:
        """Return at most ``size`` bytes; none at the end."""
        while size < 0 or len(self._left) < size:
            chunk = next(self._chunks, b"")
            if not chunk:
                break
            self._left += chunk
        size = len(self._left) if size < 0 else size
        found, self._left = self._left[:size], self._left[size:]
        return found


_PLACE = "/workspace"
_TAR = ("tar", "--numeric-owner", "--xattrs", "--acls")


class DirectoryTree:
    """A directory of this machine."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def exists(self) -> bool:
        """Return True if it is a directory."""
        try:
            return stat.S_ISDIR(os.stat(self.path, follow_symlinks=False).st_mode)
        except OSError:
            return False

    def is_empty(self) -> bool:
        """Return True if it has no files; also if it does not exist."""
        return not os.path.lexists(self.path) or (self.exists() and not any(self.path.iterdir()))

    def read(self) -> Generator[bytes]:
        """Yield everything in it, as a tar. Raises ArchiveRefused."""
        words = [*_TAR, "--one-file-system", "--sparse", "-C", str(self.path), "-cf", "-", "."]
        yield from _output(words)

    def write(self, tar: Iterable[bytes], top: tarfile.TarInfo | None) -> None:
        """Fill it from a tar, all of it or nothing, when it is empty. Raises ArchiveRefused."""
        if not self.is_empty():
            raise ArchiveRefused(what=f"{self.path} is not empty")
        # Written beside it, then renamed: a member never finds half of it.
        beside = self._beside("restoring")
        try:
            beside.mkdir(mode=0o700)
            _feed([*_TAR, "--same-owner", "-p", "-C", str(beside), "-xf", "-"], tar)
            os.rename(beside, self.path)
        except OSError as error:
            what = f"{self.path} could not be filled. Check that its folder is writable"
            raise ArchiveRefused(what, error) from error
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def delete(self) -> None:
        """Delete it with everything in it. Raises ArchiveRefused."""
        beside = self._beside("deleting")
        try:
            os.rename(self.path, beside)
            shutil.rmtree(beside)
        except OSError as error:
            where = f" (what is left of it: {beside})" if beside.exists() else ""
            raise ArchiveRefused(f"{self.path} was not deleted{where}", error) from error

    def _beside(self, what: str) -> Path:
        return self.path.with_name(f".gpuspawner-{what}-{secrets.token_hex(4)}")


@dataclass(frozen=True)
class VolumeTree:
    """A volume of a Docker Engine, wherever that runs."""

    client: docker.APIClient
    name: str
    image: str
    """Any image of the engine: nothing in it is run."""

    def exists(self) -> bool:
        """Return True if it exists."""
        try:
            _answered(lambda: self.client.inspect_volume(self.name))
        except NotFound:
            return False
        return True

    def is_empty(self) -> bool:
        """Return True if it has no files; also if it does not exist."""
        if not self.exists():
            return True
        with self._holder() as holder:
            stream, _ = _answered(lambda: self.client.get_archive(holder, f"{_PLACE}/."))
            # An empty one has the entry of the folder itself, and the end: two blocks.
            size = 0
            for chunk in stream:
                size += len(chunk)
                if size > 4096:
                    return False
        return size <= 2048

    def read(self) -> Generator[bytes]:
        """Yield everything in it, as a tar. Raises ArchiveRefused."""
        with self._holder() as holder:
            try:
                stream, _ = self.client.get_archive(holder, f"{_PLACE}/.", chunk_size=CHUNK)
                yield from stream
            except (DockerException, requests.RequestException) as error:
                what = "the container engine stopped in the middle. See that it runs, and try again"
                raise ArchiveRefused(what, error) from error

    def write(self, tar: Iterable[bytes], top: tarfile.TarInfo | None) -> None:
        """Fill it from a tar, when it is empty. Raises ArchiveRefused.

        ``top``: the tar's entry of the workspace itself.
        """
        if not self.is_empty():
            raise ArchiveRefused(what=f"the volume {self.name} is not empty")
        with self._holder() as holder:
            try:
                self.client.put_archive(holder, _PLACE, tar)
                if top is not None:  # the engine omits the entry "."
                    self.client.put_archive(holder, "/", _folder(_PLACE[1:], top))
            except (DockerException, requests.RequestException) as error:
                what = "the container engine did not take it. See that it runs and has space"
                raise ArchiveRefused(what, error) from error

    def delete(self) -> None:
        """Delete it with everything in it. Raises ArchiveRefused."""
        try:
            _answered(lambda: self.client.remove_volume(self.name))
        except APIError as error:
            what = f"the volume {self.name} was not deleted"
            raise ArchiveRefused(what, error.explanation or error) from error

    @contextlib.contextmanager
    def _holder(self) -> Iterator[str]:
        """Create a container with the volume that is never started."""
        host = {"NetworkMode": "none", "Binds": [f"{self.name}:{_PLACE}:rw"]}
        config = {"Image": self.image, "Entrypoint": ["true"], "Cmd": [], "HostConfig": host}
        name = f"gpuspawner-archive-{secrets.token_hex(6)}"
        made = _answered(lambda: self.client.create_container_from_config(config, name))
        try:
            yield str(made["Id"])
        finally:
            self.client.remove_container(made["Id"], force=True)


def _folder(name: str, like: tarfile.TarInfo) -> bytes:
    """Return a tar of only a folder, with the owner and mode of another one."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode, entry.mtime = tarfile.DIRTYPE, like.mode, like.mtime
        entry.uid, entry.gid = like.uid, like.gid
        tar.addfile(entry)
    return out.getvalue()


Tree = DirectoryTree | VolumeTree
"""The files of a workspace."""


def must_be_unused(client: docker.APIClient, source: str) -> None:
    """Raise WorkspaceBusy if a running container has it, also one that is not the hub's."""
    for listed in _answered(lambda: client.containers()):
        for mount in listed.get("Mounts") or []:
            if source in (mount.get("Source"), mount.get("Name")):
                name = str(listed["Names"][0]).lstrip("/")
                raise WorkspaceBusy(
                    f"{source} is in use by the container {name}. Stop it first: nothing was "
                    "changed."
                )


def volume_sizes(client: docker.APIClient) -> dict[str, int]:
    """Return the bytes of every volume that the engine has measured, by name."""
    told = _answered(lambda: client.df())["Volumes"] or []
    sizes = {v["Name"]: int((v.get("UsageData") or {}).get("Size", -1)) for v in told}
    return {name: size for name, size in sizes.items() if size >= 0}


def _answered(call: Callable[[], Any]) -> Any:
    """Return an engine's answer. Raises EngineUnavailable; NotFound and refusals pass through."""
    try:
        return call()
    except APIError:
        raise
    except (DockerException, requests.RequestException, OSError) as error:
        raise EngineUnavailable() from error


def _output(words: list[str]) -> Iterator[bytes]:
    """Yield what a program writes. Raises ArchiveRefused with its message if it fails."""
    with _running(words, stdout=subprocess.PIPE) as process:
        while chunk := process.stdout.read(CHUNK):
            yield chunk


def _feed(words: list[str], chunks: Iterable[bytes], **pipes: Any) -> None:
    """Run a program on some input. Raises ArchiveRefused with its message if it fails."""
    # A broken pipe: the program reports why when it ends.
    with (
        _running(words, stdin=subprocess.PIPE, **pipes) as process,
        contextlib.suppress(BrokenPipeError),
    ):
        for chunk in chunks:
            process.stdin.write(chunk)


@contextlib.contextmanager
def _running(words: list[str], **pipes: Any) -> Iterator[Any]:
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                words, stderr=said, env={**os.environ, "LC_ALL": "C"}, **pipes
            )
        except OSError as error:
            what = f"{words[0]} could not be started. Install it on this machine"
            raise ArchiveRefused(what, error) from error
        try:
            yield process
        except BaseException:
            process.kill()
            process.communicate()
            raise
        process.communicate()
        if process.returncode:
            said.seek(0)
            lines = said.read(4000).decode(errors="replace").splitlines()
            line = next((x for x in lines if x.strip()), f"exit status {process.returncode}")
            what = f"{words[0]} failed. Check who may read the files, and the space that is free"
            raise ArchiveRefused(what, line.strip()[:300])


def movable(directories: Mapping[str, str]) -> dict[str, str]:
    """Return those of the directories (old path to new path) that are here under either name.

    Raises Refused if there are files under both names, or something that is not a directory.
    """
    found = {}
    for old, new in directories.items():
        before, after = Path(old), Path(new)
        for path in (before, after):
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise Refused(
                    f"{path} is not a directory: move it away first. Nothing was changed."
                )
        if before.exists() and after.exists() and any(after.iterdir()):
            raise Refused(
                f"There are files in both {old} and {new}: merge them in {old}, empty the other "
                "one, and run this again. Nothing was changed."
            )
        if before.exists() or after.exists():
            found[old] = new
    return found


def move(directories: Mapping[str, str]) -> None:
    """Rename directories, old path to new path; already renamed ones are left alone.

    Raises Refused if one of them cannot be renamed; then none is.
    """
    done: list[tuple[str, str]] = []
    try:
        for old, new in movable(directories).items():
            if os.path.exists(old):
                os.makedirs(os.path.dirname(new), exist_ok=True)
                os.rename(old, new)  # also onto an empty directory
                done.append((old, new))
                _keep(old, new)
    except OSError as error:
        for old, new in reversed(done):
            os.rename(new, old)
        why = error.strerror or error
        raise Refused(f"{old} cannot be renamed to {new}: {why}. Nothing was changed.") from error


def _keep(*paths: str) -> None:
    """Flush the renames to disk: the database's next commit must be true after a power failure."""
    for folder in {os.path.dirname(path) for path in paths}:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
