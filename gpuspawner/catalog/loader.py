"""The catalog of environments, loaded from the admin's YAML file and reloaded when it changes.

The catalog is the only source of images, mounts and traits: a member's request only names an
environment by its slug.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.config_files import Origin, read_text, read_yaml, suggest
from ..core.errors import ConfigError, GPUSpawnerError, InvalidRequest, NotAllowed
from .models import DeviceLimits, Environment, Mount
from .parser import parse

MOST_BYTES = 16_000_000
"""Maximum size of a catalog file in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """The environments, and the datasets and shared folders of their servers."""

    environments: tuple[Environment, ...]
    datasets: tuple[Mount, ...] = ()
    shared_folders: tuple[Mount, ...] = ()
    folder: Path | None = None
    """The folder of the files that environments name; None if the catalog is not a file."""

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], origin: str = "catalog.yaml") -> Catalog:
        """Return a catalog from plain values. Raises ConfigError naming ``origin`` and the key."""
        return cls._parsed(data, Origin(origin))

    @classmethod
    def from_text(
        cls, text: str, origin: str = "catalog.yaml", folder: Path | None = None
    ) -> Catalog:
        """Return a catalog from YAML. Raises ConfigError naming ``origin``, the line and the key.

        If ``folder`` is given, the files that environments name must be in it.
        """
        data, lines = read_yaml(text, origin, folder)
        return cls._parsed({} if data is None else data, lines)

    @classmethod
    def single(cls, devices: DeviceLimits) -> Catalog:
        """Return a catalog of one environment for everyone, for a hub without a catalog file.

        The spawner's configuration decides which image runs.
        """
        only = Environment.model_construct(  # skips validation, which requires an image
            slug="default",
            display_name="Default environment",
            image="",
            default=True,
            devices=devices,
            sharing="any",
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
        """Return the environment with this slug. Raises InvalidRequest with suggestions."""
        return self._find(slug, self.environments)

    def get_for(self, slug: str, groups: Collection[str]) -> Environment:
        """Return the environment with this slug for a member of ``groups``.

        Raises InvalidRequest if it does not exist, or NotAllowed if it is for other groups. Neither
        message reveals other environments that the member may not see.
        """
        visible = self.visible_to(groups)
        environment = next((e for e in self.environments if e.slug == slug), None)
        if environment is not None and environment not in visible:
            raise NotAllowed(
                f"You may not use the environment {slug!r}: it is reserved for some groups. Choose "
                "another, or ask your admin to add you."
            )
        return self._find(slug, visible)

    def visible_to(self, groups: Collection[str]) -> tuple[Environment, ...]:
        """Return the environments that a member of ``groups`` may use, in the file's order."""
        return tuple(e for e in self.environments if e.visible_to(groups))

    def default_for(self, groups: Collection[str]) -> Environment:
        """Return the default or first environment for ``groups``. Raises NotAllowed."""
        visible = self.visible_to(groups)
        if not visible:
            raise NotAllowed(
                "You may not use any environment of this hub. Ask your admin to add you to a "
                "group that may."
            )
        return next((e for e in visible if e.default), visible[0])

    def mounts_for(self, environment: Environment, groups: Collection[str]) -> tuple[Mount, ...]:
        """Return the datasets and shared folders for a server of a member of ``groups``."""
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
    """Load the catalog file at ``path``. Raises ConfigError."""
    name = os.fspath(path)
    return Catalog.from_text(read_text(name, MOST_BYTES, "catalog"), name, Path(name).parent)


AGAIN = 5.0
"""Seconds until an invalid file is read again, because files that it names may exist by then."""

Stamp = tuple[int, int, int, int]


class WatchedCatalog:
    """The last valid catalog of a file that may change. Thread-safe.

    Checking for a change takes one ``stat`` call. The files that environments name are not
    watched: they are read whenever a page shows them.
    """

    def __init__(self, path: str | os.PathLike[str], log: logging.Logger | Any = None) -> None:
        self.path = os.fspath(path)
        self.log = log or logging.getLogger(__name__)
        self.problem = ""
        """Why the current file is invalid; empty if it is valid."""
        self._lock = threading.Lock()
        self._good: Catalog | None = None
        self._stamp: Stamp | str | None = "never read"
        self._read_at = 0.0
        self._reading: threading.Thread | None = None

    def current(self) -> Catalog:
        """Return the current catalog, or the last valid one if the file is invalid.

        Raises ConfigError if it has never been valid. On an event loop, a thread reads a changed
        file, and until then this returns the old catalog: await :meth:`refresh` first if the change
        must apply now.
        """
        good = self._good
        if good is not None and _is_on_event_loop():
            if self.is_due() and not (self._reading and self._reading.is_alive()):
                self._reading = threading.Thread(target=self._read_if_due, daemon=True)
                self._reading.start()
            return good
        self._read_if_due()
        if self._good is None:
            raise ConfigError(self.problem)
        return self._good

    async def refresh(self) -> None:
        """Reload the file off the event loop if it changed."""
        if self.is_due():
            await asyncio.to_thread(self._read_if_due)

    def is_due(self) -> bool:
        """Return True if the file changed, or if an invalid one should be read again."""
        return self._is_due(self._look())

    def _is_due(self, stamp: Stamp | None) -> bool:
        if stamp != self._stamp:
            return True
        return bool(self.problem) and time.monotonic() - self._read_at > AGAIN

    def _read_if_due(self) -> None:
        with self._lock:
            stamp = self._look()
            if self._is_due(stamp):
                self._read(stamp)

    def _look(self) -> Stamp | None:
        """Return a stamp that differs if the file changed; None if the file cannot be accessed."""
        try:
            seen = os.stat(self.path)
        except OSError:
            return None
        return seen.st_mtime_ns, seen.st_size, seen.st_ino, seen.st_dev

    def _read(self, stamp: Stamp | None) -> None:
        before = self._good
        try:
            found = load(self.path)
        except GPUSpawnerError as error:
            self._refuse(stamp, error.message)
            return
        except Exception:  # a bug in this package must not remove the environments
            self.log.exception("The catalog %s cannot be read", self.path)
            self._refuse(stamp, f"{self.path} cannot be read; the hub's log says more.")
            return
        self._read_at = time.monotonic()
        self._good, self._stamp, self.problem = found, stamp, ""
        if before is not None:
            self.log.info(
                "The catalog changed: %d environments (%d before)",
                len(found.environments),
                len(before.environments),
            )

    def _refuse(self, stamp: Stamp | None, problem: str) -> None:
        if problem != self.problem:
            stays = "; the last valid one stays" if self._good else ""
            self.log.error("The catalog is invalid%s. %s", stays, problem)
        self._stamp, self._read_at, self.problem = stamp, time.monotonic(), problem


def _is_on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def watched(settings: MutableMapping[str, Any], path: str, log: Any = None) -> WatchedCatalog:
    """Return the shared WatchedCatalog for a file from the hub's settings, created on first use."""
    kept: dict[str, WatchedCatalog] = settings.setdefault("gpuspawner_catalogs", {})
    if path not in kept:
        kept[path] = WatchedCatalog(path, log)
    return kept[path]
