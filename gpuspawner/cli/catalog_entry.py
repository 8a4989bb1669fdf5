"""A catalog entry from what an image says of itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..engines.images import ENTRY
from ..engines.pulls import split_image
from ..errors import ConfigError

OCI = "org.opencontainers.image."
_PLAIN = ("first_page", "shm_size", "min_driver", "min_cuda", "min_memory", "mem_limit")
"""Labels that are keys of an entry as they stand."""


def entry_of(
    image: str, labels: Mapping[str, str], packages: Mapping[str, str], slug: str | None = None
) -> dict[str, Any]:
    """The entry of an image with these labels and packages; ``slug`` goes before its own.

    Every image has one: what the labels do not say, its name does. Raises ConfigError for a
    label that means nothing.
    """

    def own(name: str) -> str:
        return labels.get(ENTRY + name, "").strip()

    def standard(name: str) -> str:
        return " ".join(labels.get(OCI + name, "").split())

    plain = slug or own("slug") or _slug(image)
    entry: dict[str, Any] = {"slug": plain}
    entry["display_name"] = standard("title") or plain
    if summary := standard("description"):
        entry["summary"] = summary[:200]
    entry["image"] = image
    frameworks = {
        name: packages[found]
        for name in own("packages").split()
        for found in packages
        if _same(found, name)
    }
    if frameworks:
        entry["frameworks"] = frameworks
    if devices := own("devices"):
        entry |= _devices(image, devices)
    entry |= {key: own(key) for key in _PLAIN if own(key)}
    links = {
        title: standard(key)
        for title, key in (("Documentation", "documentation"), ("Source", "source"))
        if standard(key).startswith(("https://", "http://"))
    }
    if links:
        entry["links"] = links
    if maintainer := standard("authors") or standard("vendor"):
        entry["maintainer"] = maintainer[:200]
    return entry


def _devices(image: str, text: str) -> dict[str, Any]:
    """``1-4``: one unless the member says otherwise, four at most; ``0-0`` has none."""
    found = re.fullmatch(r"(\d{1,3})-(\d{1,3})", text)
    if not found or int(found[1]) > int(found[2]):
        raise ConfigError(
            f"The label {ENTRY}devices of {image} is {text!r}. Write it as '1-4': how many GPUs a "
            "member gets, and how many at most."
        )
    return {"devices": {"default": int(found[1]), "max": int(found[2])}}


def _slug(image: str) -> str:
    """The last part of the image's name as a slug."""
    name = split_image(image)[0].rpartition("/")[2].lower()
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")[:63].strip("-") or "image"


def _same(one: str, other: str) -> bool:
    """Whether two names are the same package's."""
    return re.sub(r"[-_.]+", "-", one).lower() == re.sub(r"[-_.]+", "-", other).lower()
