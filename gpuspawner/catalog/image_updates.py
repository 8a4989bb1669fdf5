"""A newer image for an environment: pulled, tested, then entered in the catalog's file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import docker

from ..core.errors import ConfigError, GPUSpawnerError, InvalidSlug, SlugRefused
from ..engines.images import (
    Connect,
    PullProgress,
    local_images,
    offered_digest,
    packages_of_image,
    pinned_image,
    pull,
)
from ..engines.preflight import CheckFinding
from ..engines.smoke_test import passed, smoke
from .editor import CatalogFile, changes_file, packages_file
from .loader import Catalog
from .models import Environment
from .value_kinds import LONGEST_SLUG, SLUG_PATTERN, SLUG_RULE

ENGINE_SECONDS = 60.0
"""Timeout for one question to the engine; a pull has its own."""


@dataclass(frozen=True, slots=True)
class ImageOffer:
    """What an environment has, and what its registry offers."""

    environment: Environment
    old: str
    """The current image, pinned to its digest if that is known."""
    new: str
    """The offered one, pinned."""
    spare_slug: str
    """A slug that nothing has, for an environment that keeps the current image."""

    @property
    def is_newer(self) -> bool:
        """True if it is another one than the environment has."""
        return self.new != self.old

    @property
    def digest(self) -> str:
        """The digest of the offered one."""
        return self.new.partition("@")[2]


@dataclass(frozen=True, slots=True)
class ImageUpdate:
    """What an update found and did."""

    offer: ImageOffer
    findings: Sequence[CheckFinding] = ()
    """Of the test of the new image; empty if there was nothing new."""
    is_done: bool = False
    """True if the catalog has the new image now."""


class ImageUpdater:
    """Gives the environments of a catalog's file newer images. Blocks, possibly for long."""

    def __init__(self, path: Path, connect: Connect) -> None:
        self._path = path
        self._connect = connect

    def offer(self, slug: str) -> ImageOffer:
        """Ask the environment's registry. Raises ConfigError and ImageUnavailable."""
        with closing(self._connect(ENGINE_SECONDS)) as client:
            return _offer(client, CatalogFile(self._path).catalog, slug)

    def require_free(self, slug: str) -> None:
        """Raise SlugRefused if no new environment can have this slug."""
        check_slug(CatalogFile(self._path), slug)

    def update(
        self,
        slug: str,
        *,
        keep_as: str = "",
        digest: str = "",
        follow: Callable[[str, Iterator[PullProgress]], None],
        test: Callable[[], object] = lambda: None,
    ) -> ImageUpdate:
        """Update an environment to its newest image if that passes its test.

        Args:
            slug: The environment's slug.
            keep_as: The slug of a new environment that keeps the current image; empty for none.
            digest: The digest that was agreed to; empty for the newest one.
            follow: Gets the image and an iterator of :class:`PullProgress`, which it exhausts.
            test: Called before the test begins.

        Raises:
            ConfigError: The catalog's file cannot be changed automatically, or was meanwhile.
            SlugRefused: No new environment can be called ``keep_as``.
            GPUSpawnerError: The registry offers another image than the one that was agreed to.
            ImageUnavailable: The registry is not responding, or does not have it.
        """
        catalog = CatalogFile(self._path)
        if keep_as:
            check_slug(catalog, keep_as)
        with closing(self._connect(ENGINE_SECONDS)) as client:
            offer = _offer(client, catalog.catalog, slug)
            if digest and offer.digest != digest:
                raise GPUSpawnerError(
                    f"The registry of {slug} now offers another image. Look at it, then update "
                    "again: nothing was changed."
                )
            if offer.environment.image_digest == offer.digest:
                return ImageUpdate(offer)
            if not local_images(client, offer.new):
                # Pull by digest only, so that the local tag keeps naming the image of members.
                follow(offer.new, pull(self._connect, offer.new))
            test()
            found = smoke(client, offer.new, first_page=offer.environment.default_url)
            if not passed(found):
                return ImageUpdate(offer, found)
            # Minutes went by: what was written into the file meanwhile stays.
            catalog = CatalogFile(self._path)
            if catalog.catalog.get(slug).image != offer.environment.image:
                raise ConfigError(
                    f"{self._path}: the image of {slug!r} was changed during the update. That "
                    "change was kept."
                )
            environment, kept = catalog.catalog.get(slug), None
            if keep_as:
                check_slug(catalog, keep_as)
                kept = _kept_entry(client, catalog, environment, offer.old, keep_as)
            keys = {"image": offer.new, "tested_on": date.today().isoformat()}
            told = _told(client, catalog, environment, offer.new)
            catalog.set_keys(slug, keys | told, beside=kept)
        return ImageUpdate(offer, found, is_done=True)


def _offer(client: docker.APIClient, catalog: Catalog, slug: str) -> ImageOffer:
    environment = catalog.get(slug)
    here = local_images(client, environment.image)
    digest = environment.image_digest or (here.digest_in(environment.image) if here else "")
    old = pinned_image(environment.image, digest) if digest else environment.image
    new = pinned_image(environment.image, offered_digest(client, environment.image))
    return ImageOffer(environment, old, new, _spare_slug(catalog, slug))


def _spare_slug(catalog: Catalog, slug: str) -> str:
    """Return ``slug-older``, with a number if there is one."""
    taken, number, end = {e.slug for e in catalog.environments}, 1, "-older"
    while (spare := f"{slug[: LONGEST_SLUG - len(end)].rstrip('-')}{end}") in taken:
        number += 1
        end = f"-older-{number}"
    return spare


def check_slug(file: CatalogFile, slug: str, instead: str = "") -> None:
    """Raise SlugRefused if the slug is invalid or taken; ``instead`` is another way out."""
    if not re.fullmatch(SLUG_PATTERN, slug):
        raise InvalidSlug(f"An environment cannot be called {slug[:80]!r}. {SLUG_RULE}")
    if any(e.slug == slug for e in file.catalog.environments):
        raise SlugRefused(
            f"The catalog already has an environment {slug!r}. Give the new one another name"
            f"{instead}."
        )


def _told(
    client: docker.APIClient, file: CatalogFile, environment: Environment, image: str
) -> dict[str, str]:
    """Write the new image's packages and changes beside the catalog, and return their keys."""
    after = packages_of_image(client, image)
    if not after:
        return {}
    folder, slug = file.path.parent, environment.slug
    keys = {}
    if before := packages_of_image(client, environment.image):
        keys["changes"] = changes_file(folder, environment, before, after, date.today())
    keys["packages"] = packages_file(folder, slug, environment.packages, after)
    return keys


def _kept_entry(
    client: docker.APIClient, file: CatalogFile, environment: Environment, image: str, slug: str
) -> dict[str, Any]:
    """Return the environment's entry in the file with another slug and the old image."""
    entry = file.plain_entry(environment.slug)
    for key in ("default", "packages", "changes"):
        entry.pop(key, None)
    if packages := packages_of_image(client, environment.image):
        entry["packages"] = packages_file(file.path.parent, slug, "", packages)
    name = f"{environment.display_name} (older)"
    return {**entry, "slug": slug, "display_name": name, "image": image}
