"""Images of a Docker Engine: contents, pulls, updates and removal."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import docker
import requests
import urllib3
from docker.errors import APIError, DockerException, ImageNotFound, NotFound, StreamParseError

from ..core.errors import EngineUnavailable, ImageUnavailable
from .preflight import run_script, scratch_config, words_of

_LIST = """
exec python3 -c '
from importlib.metadata import distributions
for found in distributions():
    print("package", found.metadata["Name"], found.version)
'
"""


def packages_of_image(client: docker.APIClient, image: str) -> dict[str, str]:
    """Return the versions of an image's Python packages by name, sorted; empty if unknown."""
    config = scratch_config(image, _LIST, {}, {"NetworkMode": "none"})
    try:
        printed = run_script(client, config)
    except (DockerException, requests.RequestException, OSError):
        return {}
    lines = [line.split(" ") for line in printed.splitlines()]
    found = {words[1]: words[2] for words in lines if words[0] == "package" and len(words) == 3}
    return dict(sorted(found.items(), key=lambda pair: pair[0].lower()))


Connect = Callable[[float], docker.APIClient]
"""Creates a client of the engine, with a timeout in seconds."""

SILENT_SECONDS = 300.0
"""Seconds without a message of the engine after which a pull is aborted.

The engine reports each piece that is downloaded or unpacked, so even a slow registry is not silent.
"""

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
        "its registry is not responding, or stopped in the middle",
        _LATER,
    ),
)

_NO_ANSWER = (
    DockerException,
    requests.RequestException,
    urllib3.exceptions.HTTPError,  # the stream of a pull is read below requests
    OSError,
)


class PullProgress(NamedTuple):
    """The progress of a pull."""

    done: int
    """Completed layers."""
    layers: int
    """Known layers."""
    got: int
    """Downloaded bytes, of ``size``."""
    size: int
    """Bytes of all layers whose download has begun."""


def split_image(image: str) -> tuple[str, str]:
    """Return repository and tag, or the digest of a pinned image; a registry's port is no tag."""
    name, at, digest = image.partition("@")
    repository, tag = name, "latest"
    if ":" in name.rpartition("/")[2]:
        repository, _, tag = name.rpartition(":")
    return repository, digest if at else tag


def pull(
    connect: Connect, image: str, silent: float = SILENT_SECONDS
) -> Generator[PullProgress, None, None]:
    """Pull ``image`` and yield its progress. Raises ImageUnavailable.

    ``connect`` creates a client with a timeout in seconds, for this pull alone. The engine verifies
    digests: another image under the same name is refused. To abort, close the generator: the engine
    then stops, unless somebody else pulls the same image.
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
    """Set a timeout for a silent pull: docker-py itself waits forever."""
    post = client.post

    def patient(url: str, **kwargs: Any) -> Any:
        return post(url, **{**kwargs, "timeout": silent})

    client.post = patient


def _pull(client: docker.APIClient, image: str) -> Generator[PullProgress, None, None]:
    repository, tag = split_image(image)
    progress = _Layers()
    for event in client.pull(repository, tag, stream=True, decode=True):
        if "error" in event:
            raise unavailable(image, str(event["error"]))
        if progress.hear(event):
            yield progress.now()
    yield progress.now()


class _Layers:
    """Docker's messages about each layer, summed up."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._done: set[str] = set()
        self._bytes: dict[str, tuple[int, int]] = {}

    def hear(self, event: dict[str, Any]) -> bool:
        """Process a message; returns True if it was about a layer."""
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

    def now(self) -> PullProgress:
        got = sum(current for current, _ in self._bytes.values())
        size = sum(whole for _, whole in self._bytes.values())
        return PullProgress(len(self._done), len(self._known), got, size)


def unavailable(image: str, said: str) -> ImageUnavailable:
    """Convert the engine's message into a reason and a remedy."""
    for pattern, why, remedy in _WHY:
        if re.search(pattern, said, re.IGNORECASE):
            return ImageUnavailable(image=image, why=why, remedy=remedy)
    why = " ".join(said.split()).rstrip(".")[:300]
    return ImageUnavailable(image=image, why=why, remedy="Try again in a moment.")


ENTRY = "gpuspawner.catalog."
"""Prefix of the labels by which an image describes its catalog entry."""

KEPT = "gpuspawner-kept"
"""The repository of images that contain what members installed in their servers."""


@dataclass(frozen=True, slots=True)
class LocalImage:
    """An image on the engine."""

    id: str
    tags: tuple[str, ...]
    digests: tuple[str, ...]
    """``repository@sha256:...``, its names in registries; empty for one built here."""
    size: int
    """Bytes, including layers shared with other images."""
    labels: Mapping[str, str]
    layers: tuple[str, ...]

    @property
    def name(self) -> str:
        """A name for people."""
        return next(iter((*self.tags, *self.digests)), self.id[7:19])

    @property
    def repositories(self) -> frozenset[str]:
        """The repositories of its tags and digests."""
        return frozenset(split_image(name)[0] for name in (*self.tags, *self.digests))

    def digest_in(self, reference: str) -> str:
        """Return its digest in the reference's repository; empty if it has none there."""
        repository = split_image(reference)[0]
        found = (name.partition("@") for name in self.digests)
        return next((digest for name, _, digest in found if name == repository), "")


def local_images(client: docker.APIClient, reference: str) -> LocalImage | None:
    """Return the engine's image with this reference, or None. Raises EngineUnavailable."""
    try:
        return _image(client.inspect_image(reference))
    except (ImageNotFound, NotFound):
        return None
    except (DockerException, requests.RequestException, OSError) as error:
        raise _no_answer(error) from error


def offered_digest(client: docker.APIClient, reference: str) -> str:
    """Return the digest that the registry has now for a tag. Raises ImageUnavailable."""
    repository, tag = split_image(reference.partition("@")[0])
    try:
        told = client.inspect_distribution(f"{repository}:{tag}")
        return str(told["Descriptor"]["digest"])
    except (DockerException, requests.RequestException, OSError, KeyError) as error:
        raise unavailable(reference, words_of(error)) from error


@dataclass(frozen=True, slots=True)
class ImageState:
    """What the engine and, if it was asked, the registry have of a reference."""

    image: str
    size: int | None
    """Bytes on the engine; None if the image is not there."""
    digest: str
    """Its digest in its registry; empty for one that was built here, or is not there."""
    offered: str = ""
    """The digest that the registry has now; empty if it was not asked, or does not say."""
    why: str = ""
    """Why the registry does not say."""

    @property
    def is_outdated(self) -> bool:
        """True if the registry has another image by now."""
        return bool(self.offered) and self.offered != self.digest


def image_state(client: docker.APIClient, image: str, *, ask_registry: bool) -> ImageState:
    """Return whether an image is here and, if asked, the newest. Raises EngineUnavailable."""
    here = local_images(client, image)
    if here is None:
        return ImageState(image, None, "")
    digest = image.partition("@")[2] or here.digest_in(image)
    if not digest or not ask_registry:
        return ImageState(image, here.size, digest)
    try:
        return ImageState(image, here.size, digest, offered_digest(client, image))
    except ImageUnavailable as error:
        return ImageState(image, here.size, digest, why=error.fields["why"])


def pinned_image(reference: str, digest: str) -> str:
    """Return the reference with this digest in place of any other: ``name:tag@sha256:...``."""
    return f"{reference.partition('@')[0]}@{digest}"


@dataclass(frozen=True, slots=True)
class RemovableImage:
    """An image that is no longer needed."""

    image: LocalImage
    why: str


def removable(client: docker.APIClient, named: Collection[str]) -> list[RemovableImage]:
    """Return images that are no longer environments. Raises EngineUnavailable.

    ``named`` are the references that must stay: those of the catalog, including pinned ones. Only
    images of their repositories, and nameless ones left by our builds, are considered: everything
    else on the engine belongs to somebody else. An image stays if any container has it, running or
    not, if it contains a member's own packages, or if others are built on it.
    """
    wanted = [found for reference in set(named) if (found := local_images(client, reference))]
    repositories = {name for image in wanted for name in image.repositories}
    repositories |= {split_image(reference)[0] for reference in named}
    try:
        # The engine itself refuses to remove one that gets a container from here on.
        used = {str(listed["ImageID"]) for listed in client.containers(all=True)}
        used |= {image.id for image in wanted}
        seen = [local_images(client, str(listed["Id"])) for listed in client.images()]
        images = [image for image in seen if image]  # without those removed meanwhile
    except (DockerException, requests.RequestException, OSError) as error:
        raise _no_answer(error) from error
    needed = [x for x in images if x.id in used or KEPT in x.repositories]
    result: list[RemovableImage] = []
    for image in images:
        ours = any(label.startswith(ENTRY) for label in image.labels)
        nameless = ours and not (image.tags or image.digests)
        if image in needed or not (nameless or image.repositories & repositories):
            continue
        if any(_is_part_of(image, other) for other in needed):
            continue  # another image has its layers: nothing would be freed
        result.append(RemovableImage(image, "left by a build" if nameless else "an older version"))
    return sorted(result, key=lambda each: each.image.name)


def remove(client: docker.APIClient, image: LocalImage) -> str:
    """Remove an image by all its names; returns why not, if the engine says that it is needed."""
    for name in (*image.tags, *image.digests) or (image.id,):
        try:
            client.remove_image(name)
        except NotFound:
            continue  # it disappeared with another name
        except APIError as error:
            return words_of(error)
        except (DockerException, requests.RequestException, OSError) as error:
            raise _no_answer(error) from error
    return ""


def _no_answer(error: Exception) -> EngineUnavailable:
    return EngineUnavailable(
        f"The container engine is not responding: {words_of(error)}. Try again in a moment."
    )


def _is_part_of(image: LocalImage, other: LocalImage) -> bool:
    """Return True if ``other`` is built on it; a kept one is, even without changes."""
    layers = len(image.layers)
    more = len(other.layers) > layers or KEPT in other.repositories
    return more and layers > 0 and other.layers[:layers] == image.layers


def _image(told: Mapping[str, Any]) -> LocalImage:
    config = told.get("Config") or {}
    unnamed = ("<none>:<none>", "<none>@<none>")
    return LocalImage(
        id=str(told["Id"]),
        tags=tuple(tag for tag in told.get("RepoTags") or () if tag not in unnamed),
        digests=tuple(name for name in told.get("RepoDigests") or () if name not in unnamed),
        size=int(told.get("Size") or 0),
        labels={str(k): str(v) for k, v in (config.get("Labels") or {}).items()},
        layers=tuple((told.get("RootFS") or {}).get("Layers") or ()),
    )
