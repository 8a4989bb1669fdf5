"""A workspace as a tree of files that can be read and written as one tar, whatever keeps it.

A directory of this machine goes through GNU tar, a volume of the engine through a container
that is created and never started. Neither follows a symlink of a member's.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import docker
import requests
from docker.errors import APIError, DockerException, NotFound

from ..errors import ArchiveRefused, EngineUnavailable, WorkspaceBusy

CHUNK = 1 << 20
_PLACE = "/workspace"
_TAR = ("tar", "--numeric-owner", "--xattrs", "--acls")


class Tree(Protocol):
    """Where a workspace's files are."""

    name: str

    def exists(self) -> bool:
        """Whether it is there."""

    def is_empty(self) -> bool:
        """Whether nothing is in it; what is not there is empty too."""

    def read(self) -> Iterator[bytes]:
        """Everything in it, as a tar. Raises ArchiveRefused."""

    def write(self, tar: Iterable[bytes], top: tarfile.TarInfo | None) -> None:
        """Put a tar in place of nothing; a directory gets all of it or none.

        ``top``: the tar's entry of the workspace itself. Raises ArchiveRefused.
        """

    def delete(self) -> None:
        """Delete it with everything in it. Raises ArchiveRefused."""


class DirectoryTree:
    """A directory of this machine."""

    def __init__(self, path: str) -> None:
        self.name = path
        self.path = Path(path)

    def exists(self) -> bool:
        try:
            return stat.S_ISDIR(os.stat(self.path, follow_symlinks=False).st_mode)
        except OSError:
            return False

    def is_empty(self) -> bool:
        return not os.path.lexists(self.path) or (self.exists() and not any(self.path.iterdir()))

    def read(self) -> Iterator[bytes]:
        words = [*_TAR, "--one-file-system", "--sparse", "-C", str(self.path), "-cf", "-", "."]
        with _running(words, stdout=subprocess.PIPE) as process:
            while chunk := process.stdout.read(CHUNK):
                yield chunk

    def write(self, tar: Iterable[bytes], top: tarfile.TarInfo | None) -> None:
        if not self.is_empty():
            raise ArchiveRefused(what=f"{self.path} is not empty")
        # Beside it, then renamed: a member never finds the half of it.
        beside = self._beside("restoring")
        try:
            beside.mkdir(mode=0o700)
            words = [*_TAR, "--same-owner", "-p", "-C", str(beside), "-xf", "-"]
            # A broken pipe: it says why when it ends.
            with (
                _running(words, stdin=subprocess.PIPE) as process,
                contextlib.suppress(BrokenPipeError),
            ):
                for chunk in tar:
                    process.stdin.write(chunk)
            os.rename(beside, self.path)
        except OSError as error:
            raise ArchiveRefused(what=f"{self.path}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def delete(self) -> None:
        beside = self._beside("deleting")
        try:
            os.rename(self.path, beside)
            shutil.rmtree(beside)
        except OSError as error:
            where = f" (what is left of it: {beside})" if beside.exists() else ""
            what = f"{self.path} is not deleted: {error.strerror or error}{where}"
            raise ArchiveRefused(what=what) from error

    def _beside(self, what: str) -> Path:
        return self.path.with_name(f".gpuspawner-{what}-{secrets.token_hex(4)}")


class VolumeTree:
    """A volume of a Docker Engine, wherever that runs."""

    def __init__(self, client: docker.APIClient, name: str, image: str) -> None:
        """``image`` is any that the engine has: nothing in it is run."""
        self.client = client
        self.name = name
        self.image = image

    def exists(self) -> bool:
        try:
            _answered(lambda: self.client.inspect_volume(self.name))
        except NotFound:
            return False
        return True

    def is_empty(self) -> bool:
        if not self.exists():
            return True
        with self._holder() as holder:
            stream, _ = _answered(lambda: self.client.get_archive(holder, f"{_PLACE}/."))
            # Of an empty one there is the entry of the folder itself, and the end: two blocks.
            size = 0
            for chunk in stream:
                size += len(chunk)
                if size > 4096:
                    return False
        return size <= 2048

    def read(self) -> Iterator[bytes]:
        with self._holder() as holder:
            try:
                stream, _ = self.client.get_archive(holder, f"{_PLACE}/.", chunk_size=CHUNK)
                yield from stream
            except (DockerException, requests.RequestException) as error:
                raise ArchiveRefused(what=f"the engine stopped in the middle ({error})") from error

    def write(self, tar: Iterable[bytes], top: tarfile.TarInfo | None) -> None:
        if not self.is_empty():
            raise ArchiveRefused(what=f"the volume {self.name} is not empty")
        with self._holder() as holder:
            try:
                self.client.put_archive(holder, _PLACE, tar)
                if top is not None:  # the engine leaves the entry "." out
                    self.client.put_archive(holder, "/", _folder(_PLACE[1:], top))
            except (DockerException, requests.RequestException) as error:
                raise ArchiveRefused(what=f"the engine did not take it ({error})") from error

    def delete(self) -> None:
        try:
            _answered(lambda: self.client.remove_volume(self.name))
        except APIError as error:
            what = f"the volume {self.name} is not deleted: {error.explanation or error}"
            raise ArchiveRefused(what=what) from error

    @contextlib.contextmanager
    def _holder(self) -> Iterator[str]:
        """A container that has the volume and is never started."""
        host = {"NetworkMode": "none", "Binds": [f"{self.name}:{_PLACE}:rw"]}
        config = {"Image": self.image, "Entrypoint": ["true"], "Cmd": [], "HostConfig": host}
        name = f"gpuspawner-archive-{secrets.token_hex(6)}"
        made = _answered(lambda: self.client.create_container_from_config(config, name))
        try:
            yield str(made["Id"])
        finally:
            self.client.remove_container(made["Id"], force=True)


def _folder(name: str, like: tarfile.TarInfo) -> bytes:
    """A tar of nothing but a folder, with the owner and the mode of another one."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode, entry.mtime = tarfile.DIRTYPE, like.mode, like.mtime
        entry.uid, entry.gid = like.uid, like.gid
        tar.addfile(entry)
    return out.getvalue()


def must_be_unused(client: docker.APIClient, source: str) -> None:
    """Raises WorkspaceBusy when a container that runs has it, whoever started that."""
    for listed in _answered(lambda: client.containers()):
        for mount in listed.get("Mounts") or []:
            if source in (mount.get("Source"), mount.get("Name")):
                name = str(listed["Names"][0]).lstrip("/")
                raise WorkspaceBusy(
                    f"{source} is in use by the container {name}. Stop it first: nothing was "
                    "changed."
                )


def volume_sizes(client: docker.APIClient) -> dict[str, int]:
    """The bytes of every volume that the engine has counted, by name."""
    told = _answered(lambda: client.df())["Volumes"] or []
    sizes = {v["Name"]: int((v.get("UsageData") or {}).get("Size", -1)) for v in told}
    return {name: size for name, size in sizes.items() if size >= 0}


def _answered(call: Callable[[], Any]) -> Any:
    """An engine's answer. Raises EngineUnavailable for none; NotFound and refusals pass."""
    try:
        return call()
    except APIError:
        raise
    except (DockerException, requests.RequestException, OSError) as error:
        raise EngineUnavailable() from error


@contextlib.contextmanager
def _running(words: list[str], **pipes: Any) -> Iterator[Any]:
    """A program with a pipe to it; raises ArchiveRefused with its words when it fails."""
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                words, stderr=said, env={**os.environ, "LC_ALL": "C"}, **pipes
            )
        except OSError as error:
            raise ArchiveRefused(what=f"{words[0]} cannot be run: {error.strerror}") from error
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
            raise ArchiveRefused(what=f"{words[0]} says: {line.strip()[:300].rstrip('.')}")
