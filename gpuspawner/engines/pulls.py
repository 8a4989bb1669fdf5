"""Pulling an image, with how far it is, and why it failed in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, NamedTuple

import docker
import requests
import urllib3
from docker.errors import DockerException, StreamParseError

from ..errors import ImageUnavailable
from .probe import words_of

Connect = Callable[[float], docker.APIClient]
"""Makes a client of the engine, with a timeout in seconds."""

SILENT_SECONDS = 300.0
"""Seconds without a word of the engine after which a pull is given up. It tells of each piece
that comes or is unpacked, so that even a slow registry is not silent."""

_LATER = "Try again; what came already is kept for a while."

_WHY = (
    (
        r"no space left on device|disk quota exceeded",
        "the engine's disk is full",
        "Make room: `gpuspawner catalog prune` shows what can go.",
    ),
    (
        r"verification failed|does not match|unexpected (commit )?digest|wrong digest",
        "what its registry sent is not what the digest says, so it was thrown away",
        "Try again; if it stays, tell who runs the registry.",
    ),
    (
        r"manifest unknown|not found|does not exist|access to the resource is denied|"
        r"name unknown|no such (image|manifest)",
        "its registry has no such image, or shows it to others only",
        "Check the name, or sign in with `docker login` as the hub's user.",
    ),
    (
        r"unauthorized|authentication required|no basic auth|denied",
        "its registry wants a sign-in",
        "Sign in with `docker login` as the hub's user.",
    ),
    (
        r"timed? ?out|deadline exceeded|connection (refused|reset)|no such host|unexpected EOF|"
        r"\bEOF\b|byte range|TLS handshake|network is unreachable|temporary failure|"
        r"name resolution",
        "its registry does not answer, or stopped in the middle",
        _LATER,
    ),
)

_NO_ANSWER = (
    DockerException,
    requests.RequestException,
    urllib3.exceptions.HTTPError,  # the stream of a pull is read below requests
    OSError,
)


class Progress(NamedTuple):
    """How far a pull is."""

    done: int
    """Layers that are here."""
    layers: int
    """Layers that are known of."""
    got: int
    """Bytes that came, of ``size``."""
    size: int
    """Bytes of all layers whose download has begun."""


def split_image(image: str) -> tuple[str, str]:
    """Repository and tag, or the digest of a pinned one; a registry's port is no tag."""
    name, at, digest = image.partition("@")
    repository, tag = name, "latest"
    if ":" in name.rpartition("/")[2]:
        repository, _, tag = name.rpartition(":")
    return repository, digest if at else tag


def pull(
    connect: Connect, image: str, silent: float = SILENT_SECONDS
) -> Generator[Progress, None, None]:
    """Pull ``image`` and say how far it is. Raises ImageUnavailable.

    ``connect`` makes a client with a timeout in seconds, for this pull alone. A digest is proved
    by the engine: another image under its name is refused. To give up is to close the
    generator: the engine then stops, unless somebody else pulls the same.
    """
    try:
        with closing(connect(silent)) as client:
            _limit(client, silent)
            yield from _pull(client, image)
    except (requests.Timeout, urllib3.exceptions.ReadTimeoutError, TimeoutError) as error:
        why = f"nothing came from its registry for {silent:.0f} seconds"
        raise ImageUnavailable(image=image, why=why, remedy=_LATER) from error
    except StreamParseError as error:
        raise ImageUnavailable(image=image, why="the engine stopped", remedy=_LATER) from error
    except _NO_ANSWER as error:
        raise unavailable(image, words_of(error)) from error


def _limit(client: docker.APIClient, silent: float) -> None:
    """Give up a silent pull: docker-py itself waits for one as long as it takes."""
    post = client.post

    def patient(url: str, **kwargs: Any) -> Any:
        return post(url, **{**kwargs, "timeout": silent})

    client.post = patient


def _pull(client: docker.APIClient, image: str) -> Generator[Progress, None, None]:
    repository, tag = split_image(image)
    progress = _Layers()
    for event in client.pull(repository, tag, stream=True, decode=True):
        if "error" in event:
            raise unavailable(image, str(event["error"]))
        if progress.hear(event):
            yield progress.now()
    yield progress.now()


class _Layers:
    """Docker's messages about each layer, added up."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._done: set[str] = set()
        self._bytes: dict[str, tuple[int, int]] = {}

    def hear(self, event: dict[str, Any]) -> bool:
        """Whether the message was about a layer."""
        layer, status = str(event.get("id", "")), str(event.get("status", ""))
        if not layer or status.startswith("Pulling from"):
            return False
        self._known.add(layer)
        if status in ("Pull complete", "Already exists"):
            self._done.add(layer)
        detail = event.get("progressDetail") or {}
        if status == "Downloading" and detail.get("total"):
            self._bytes[layer] = (int(detail["current"]), int(detail["total"]))
        elif status == "Download complete" and layer in self._bytes:
            self._bytes[layer] = (self._bytes[layer][1],) * 2
        return True

    def now(self) -> Progress:
        got = sum(current for current, _ in self._bytes.values())
        size = sum(whole for _, whole in self._bytes.values())
        return Progress(len(self._done), len(self._known), got, size)


def unavailable(image: str, said: str) -> ImageUnavailable:
    """The engine's words as a reason and what to do."""
    for pattern, why, remedy in _WHY:
        if re.search(pattern, said, re.IGNORECASE):
            return ImageUnavailable(image=image, why=why, remedy=remedy)
    why = " ".join(said.split()).rstrip(".")[:300]
    return ImageUnavailable(image=image, why=why, remedy="Try again in a moment.")
