"""The catalog of environments: what members can choose, read from the admin's YAML file.

Pure, apart from :func:`load`. The catalog is the only source of images, mounts and traits:
a member's request names an environment by its slug, and nothing else of it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest, NotAllowed
from ..reading.files import read_text
from ..reading.origin import Origin
from ..reading.section import suggest
from ..reading.yaml_text import read_yaml
from .choices import ProfileChoice, ProfileOption
from .kinds import MOST_HOURS, WORKSPACE
from .parse import parse
from .values import (
    DeviceLimits,
    Environment,
    Framework,
    Link,
    Mount,
    SessionHours,
)

__all__ = [
    "MOST_HOURS",
    "WORKSPACE",
    "Catalog",
    "DeviceLimits",
    "Environment",
    "Framework",
    "Link",
    "Mount",
    "ProfileChoice",
    "ProfileOption",
    "SessionHours",
    "load",
]

MOST_BYTES = 16_000_000
"""The largest file that is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """Environments, and the datasets and shared folders that their servers get."""

    environments: tuple[Environment, ...]
    datasets: tuple[Mount, ...] = ()
    shared_folders: tuple[Mount, ...] = ()
    folder: Path | None = None
    """Where the files are that environments name; None when the catalog is no file."""

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], origin: str = "catalog.yaml") -> Catalog:
        """The catalog in plain values. Raises ConfigError naming ``origin`` and the key."""
        return cls._parsed(data, Origin(origin))

    @classmethod
    def from_text(
        cls, text: str, origin: str = "catalog.yaml", folder: Path | None = None
    ) -> Catalog:
        """The catalog in YAML. Raises ConfigError naming ``origin``, the line and the key.

        The files that environments name are looked for in ``folder``, if it is given.
        """
        data, lines = read_yaml(text, origin, folder)
        return cls._parsed({} if data is None else data, lines)

    @classmethod
    def single(
        cls,
        image: str = "",
        *,
        devices: DeviceLimits | None = None,
        display_name: str = "Default environment",
    ) -> Catalog:
        """The built-in catalog of a hub that has none: one environment, open to everyone.

        Without an image, the spawner's own configuration decides it.
        """
        only = Environment(
            slug="default",
            display_name=display_name,
            image=image,
            default=True,
            devices=devices or DeviceLimits(),
        )
        return cls(environments=(only,))

    @classmethod
    def _parsed(cls, data: object, origin: Origin) -> Catalog:
        environments, datasets, folders = parse(data, origin)
        return cls(
            environments=environments,
            datasets=datasets,
            shared_folders=folders,
            folder=origin.folder,
        )

    def get(self, slug: str) -> Environment:
        """The environment of this slug, whoever may use it.

        Raises InvalidRequest with what there is instead.
        """
        return self._find(slug, self.environments)

    def get_for(self, slug: str, groups: Collection[str]) -> Environment:
        """The environment of this slug for a member of ``groups``.

        Raises InvalidRequest when there is none, NotAllowed when it is for others; neither
        sentence names environments that the member may not see.
        """
        visible = self.visible_to(groups)
        environment = next((e for e in self.environments if e.slug == slug), None)
        if environment is not None and environment not in visible:
            raise NotAllowed(
                f"You may not use the environment {slug!r}: it is kept for certain groups. Choose "
                "another, or ask your admin to add you."
            )
        return self._find(slug, visible)

    def visible_to(self, groups: Collection[str]) -> tuple[Environment, ...]:
        """The environments that a member of ``groups`` may use, in the file's order."""
        return tuple(e for e in self.environments if e.visible_to(groups))

    def default_for(self, groups: Collection[str]) -> Environment:
        """The environment to choose for a member of ``groups``: the default, else the first.

        Raises NotAllowed when there is none that the member may use.
        """
        visible = self.visible_to(groups)
        if not visible:
            raise NotAllowed(
                "No environment of this hub is open to you. Ask your admin to add you to a group "
                "that may use one."
            )
        return next((e for e in visible if e.default), visible[0])

    def mounts_for(self, environment: Environment, groups: Collection[str]) -> tuple[Mount, ...]:
        """The datasets and shared folders for a server of a member of ``groups``."""
        offered = (
            (self.datasets, environment.datasets),
            (self.shared_folders, environment.shared_folders),
        )
        return tuple(
            mount
            for mounts, chosen in offered
            for mount in mounts
            if (chosen is None or mount.name in chosen) and mount.visible_to(groups)
        )

    @staticmethod
    def _find(slug: str, among: tuple[Environment, ...]) -> Environment:
        for environment in among:
            if environment.slug == slug:
                return environment
        there = suggest(slug, [e.slug for e in among], "Choose one of")
        raise InvalidRequest(
            f"There is no environment {slug[:60]!r} on this hub. {there}", field="environment"
        )


def load(path: str | os.PathLike[str]) -> Catalog:
    """The catalog in the file at ``path``. Raises ConfigError."""
    name = os.fspath(path)
    return Catalog.from_text(read_text(name, MOST_BYTES, "catalog"), name, Path(name).parent)
