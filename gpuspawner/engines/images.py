"""The images of a Docker Engine: what is here, what a registry offers, and what may go."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound

from ..errors import EngineUnavailable
from .probe import words_of
from .pulls import split_image, unavailable

ENTRY = "gpuspawner.catalog."
"""What the labels begin with by which an image says how its catalog entry looks."""

KEPT = "gpuspawner-kept"
"""The repository of the images that keep what members installed in their servers."""


@dataclass(frozen=True, slots=True)
class LocalImage:
    """An image that the engine has."""

    id: str
    tags: tuple[str, ...]
    digests: tuple[str, ...]
    """``repository@sha256:...``, under which registries have it; none of one built here."""
    size: int
    """Bytes, with the layers that it shares with others."""
    labels: Mapping[str, str]
    layers: tuple[str, ...]

    @property
    def name(self) -> str:
        """A name for people."""
        return next(iter((*self.tags, *self.digests)), self.id[7:19])

    @property
    def repositories(self) -> frozenset[str]:
        return frozenset(split_image(name)[0] for name in (*self.tags, *self.digests))

    def digest_in(self, reference: str) -> str:
        """Its digest in the reference's repository; empty when it has none there."""
        repository = split_image(reference)[0]
        found = (name.partition("@") for name in self.digests)
        return next((digest for name, _, digest in found if name == repository), "")


def local(client: docker.APIClient, reference: str) -> LocalImage | None:
    """The image that the engine has under this reference. Raises EngineUnavailable."""
    try:
        return _image(client.inspect_image(reference))
    except (ImageNotFound, NotFound):
        return None
    except (DockerException, requests.RequestException, OSError) as error:
        raise _no_answer(error) from error


def offered(client: docker.APIClient, reference: str) -> str:
    """The digest that the reference's registry has now for its tag. Raises ImageUnavailable."""
    repository, tag = split_image(reference.partition("@")[0])
    try:
        told = client.inspect_distribution(f"{repository}:{tag}")
        return str(told["Descriptor"]["digest"])
    except (DockerException, requests.RequestException, OSError, KeyError) as error:
        raise unavailable(reference, words_of(error)) from error


def pinned(reference: str, digest: str) -> str:
    """The reference with this digest in place of any other: ``name:tag@sha256:...``."""
    return f"{reference.partition('@')[0]}@{digest}"


@dataclass(frozen=True, slots=True)
class Removable:
    """An image that nothing needs any more."""

    image: LocalImage
    why: str


def removable(client: docker.APIClient, named: Collection[str]) -> list[Removable]:
    """Images that were environments and are no more. Raises EngineUnavailable.

    ``named`` are the references that must stay: those of the catalog, pinned ones among them.
    Only images of their repositories, and nameless ones that builds of ours left, are looked at:
    whatever else the engine has is somebody else's. One that any container has, running or
    not, that keeps a member's own packages, or that others are built on, stays.
    """
    wanted = [found for reference in set(named) if (found := local(client, reference))]
    repositories = {name for image in wanted for name in image.repositories}
    repositories |= {split_image(reference)[0] for reference in named}
    try:
        # One that gets a container from here on is refused by the engine itself.
        used = {str(listed["ImageID"]) for listed in client.containers(all=True)}
        used |= {image.id for image in wanted}
        seen = [local(client, str(listed["Id"])) for listed in client.images()]
        images = [image for image in seen if image]  # without those that went meanwhile
    except (DockerException, requests.RequestException, OSError) as error:
        raise _no_answer(error) from error
    needed = [x for x in images if x.id in used or KEPT in x.repositories]
    result: list[Removable] = []
    for image in images:
        ours = any(label.startswith(ENTRY) for label in image.labels)
        nameless = ours and not (image.tags or image.digests)
        if image in needed or not (nameless or image.repositories & repositories):
            continue
        if any(_is_part_of(image, other) for other in needed):
            continue  # its layers are another's: nothing would be freed
        result.append(Removable(image, "left by a build" if nameless else "an older version"))
    return sorted(result, key=lambda each: each.image.name)


def remove(client: docker.APIClient, image: LocalImage) -> str:
    """Remove it by all of its names; why not, when the engine says that it is needed."""
    for name in (*image.tags, *image.digests) or (image.id,):
        try:
            client.remove_image(name)
        except NotFound:
            continue  # it went with another name
        except APIError as error:
            return words_of(error)
        except (DockerException, requests.RequestException, OSError) as error:
            raise _no_answer(error) from error
    return ""


def _no_answer(error: Exception) -> EngineUnavailable:
    return EngineUnavailable(
        f"The container engine does not answer: {words_of(error)}. Try again in a moment."
    )


def _is_part_of(image: LocalImage, other: LocalImage) -> bool:
    """Whether ``other`` is built on it; a kept one is, though its member changed nothing yet."""
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
