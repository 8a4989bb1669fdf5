"""Files in workspaces, read through a container that is created and never started.

The engine looks up a path inside the container's own root, and mounts nothing into it but the
workspace: a member's symlink leads nowhere else. It locks a container until a file was read to its
end, so the container of a server or a run is never used for this.
"""

from __future__ import annotations

import base64
import json
import secrets
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import docker
import requests
import urllib3
from docker.errors import APIError, DockerException, NotFound

from ..core.errors import EngineUnavailable, NoRunFiles

LABEL_FILES = "gpuspawner.files"
"""Label of these containers: when one was created, in seconds of Unix time."""

LEFTOVER_AFTER = 2 * 3600
"""Seconds after which such a container belongs to a process that was killed."""

PLACE = "/workspace"

CHUNK = 1 << 20

GONE = "its workspace is gone"

_IRREGULAR = sum(1 << bit for bit in (31, 27, 26, 25, 24, 21, 19))
"""Go's type bits of a file's mode: directory, symlink, device, pipe, socket, and other ones."""


class NotRegular(Exception):
    """A path leads to a directory, a symlink or a device."""


class OpenFile:
    """A regular file as the engine sends it. Blocks like everything in here: use a thread."""

    def __init__(self, response: requests.Response) -> None:
        """Begin to read. Raises EngineUnavailable."""
        self._response = response
        with _answers():
            # The engine sends a tar with one entry. What a member changes meanwhile is not in it.
            # It needs no end: closing the connection ends it.
            tar = tarfile.open(fileobj=response.raw, mode="r|", bufsize=CHUNK)  # noqa: SIM115
            entry = tar.next()
            content = tar.extractfile(entry) if entry and entry.isreg() else None
        if entry is None or content is None:
            raise EngineUnavailable
        self.size = entry.size
        self._content: IO[bytes] = content

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most ``size``; none at the end. Raises EngineUnavailable."""
        with _answers():
            return self._content.read(size)

    def skip(self, offset: int) -> None:
        """Pass over bytes: the engine sends them in any case. Raises EngineUnavailable."""
        while offset and (passed := len(self.read(min(offset, CHUNK)))):
            offset -= passed

    def close(self) -> None:
        """End the connection; the engine sends no more."""
        self._response.close()


class MountedWorkspace:
    """A workspace that can be read until it is closed. It is never created, nor written to."""

    def __init__(self, client: docker.APIClient, source: str) -> None:
        """Mount a directory or volume. Raises NoRunFiles or EngineUnavailable."""
        self._client = client
        with _answers():
            self._ref = _mount(client, source)

    @contextmanager
    def open(self, path: str) -> Iterator[OpenFile]:
        """Open a regular file, by its path in the workspace.

        Raises FileNotFoundError, NotRegular, or EngineUnavailable.
        """
        client = self._client
        url = f"{client.base_url}/v{client.api_version}/containers/{self._ref}/archive"
        with _answers():
            response = client.get(
                url,
                params={"path": f"{PLACE}/{path}"},
                headers={"Accept-Encoding": "identity"},
                stream=True,
                timeout=client.timeout,
            )
        try:
            if response.status_code == 404:
                raise FileNotFoundError(path)
            if not response.ok:
                raise EngineUnavailable
            stated = response.headers["X-Docker-Container-Path-Stat"]
            if json.loads(base64.b64decode(stated))["mode"] & _IRREGULAR:
                raise NotRegular(path)
            yield OpenFile(response)
        finally:
            response.close()

    def is_mounted(self) -> bool:
        """Return False if somebody removed the container. Raises EngineUnavailable."""
        with _answers():
            try:
                self._client.inspect_container(self._ref)
            except NotFound:
                return False
        return True

    def close(self) -> None:
        """Remove the container. One that cannot be removed now is removed as a leftover."""
        with suppress(DockerException, requests.RequestException, OSError):
            self._client.remove_container(self._ref, force=True, v=True)


def remove_leftovers(client: docker.APIClient) -> None:
    """Remove the containers that a killed process left. Errors are ignored: it is tried again."""
    with suppress(DockerException, requests.RequestException, OSError):
        for listed in client.containers(all=True, filters={"label": LABEL_FILES}):
            created = str(listed["Labels"].get(LABEL_FILES, ""))
            if created.isdigit() and time.time() - int(created) > LEFTOVER_AFTER:
                with suppress(APIError):
                    client.remove_container(listed["Id"], force=True, v=True)


def _mount(client: docker.APIClient, source: str) -> str:
    images = client.images()
    if not images:
        raise NoRunFiles(why="the container engine has no image to read files with")
    mount: dict[str, Any] = {"Type": "bind", "Source": source, "Target": PLACE, "ReadOnly": True}
    if not source.startswith("/"):
        try:
            client.inspect_volume(source)  # the engine would create a missing one
        except NotFound:
            raise NoRunFiles(why=GONE) from None
        mount |= {"Type": "volume", "VolumeOptions": {"NoCopy": True}}
    config = {
        "Image": images[0]["Id"],  # nothing in it is run
        "Entrypoint": ["true"],
        "Labels": {LABEL_FILES: str(int(time.time()))},
        "HostConfig": {"NetworkMode": "none", "Mounts": [mount]},
    }
    name = f"gpuspawner-files-{secrets.token_hex(6)}"
    try:
        return str(client.create_container_from_config(config, name)["Id"])
    except APIError as error:
        # Unlike with "Binds", the engine creates no directory.
        if error.status_code == 400 and "does not exist" in str(error.explanation):
            raise NoRunFiles(why=GONE) from None
        raise


@contextmanager
def _answers() -> Iterator[None]:
    try:
        yield
    except (DockerException, requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise EngineUnavailable from error
    except (OSError, tarfile.TarError) as error:
        raise EngineUnavailable from error
