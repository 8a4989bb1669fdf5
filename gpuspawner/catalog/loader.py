"""The catalog of environments, loaded from the admin's YAML file and again when it changes.

The catalog is the only source of images, mounts and traits:
a member's request names an environment by its slug, and nothing else of it.
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
        only = Environment.model_construct(  # no file's may be without an image
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


AGAIN = 5.0
"""Seconds after which a file that was not right is read again: what it names may be there now."""

Stamp = tuple[int, int, int, int]


class WatchedCatalog:
    """What a file says, as it last was right. Thread-safe.

    Looking whether the file changed is one question to the file system. Files that
    environments name are not watched: whoever shows one reads it then.
    """

    def __init__(self, path: str | os.PathLike[str], log: logging.Logger | Any = None) -> None:
        self.path = os.fspath(path)
        self.log = log or logging.getLogger(__name__)
        self.problem = ""
        """Why what the file says now does not hold; empty when it does."""
        self._lock = threading.Lock()
        self._good: Catalog | None = None
        self._stamp: Stamp | str | None = "never read"
        self._read_at = 0.0
        self._reading: threading.Thread | None = None

    def current(self) -> Catalog:
        """The catalog as the file is now, else as it last was right.

        Raises ConfigError when it was never right. On an event loop a change is read in a thread,
        and counts once it has been read: await :meth:`refresh` before, where it has to count now.
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
        """Read a change of the file, if there is one, off the event loop."""
        if self.is_due():
            await asyncio.to_thread(self._read_if_due)

    def is_due(self) -> bool:
        """Return True if the file changed, or is to be tried again."""
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
        """What tells one state of the file from another; None when it cannot be seen."""
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
        except Exception:  # a defect of ours must not take the environments away
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
            stays = "; the last good one stays" if self._good else ""
            self.log.error("The catalog is not right%s. %s", stays, problem)
        self._stamp, self._read_at, self.problem = stamp, time.monotonic(), problem


def _is_on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def watched(settings: MutableMapping[str, Any], path: str, log: Any = None) -> WatchedCatalog:
    """The one for this file in a hub's settings, made by whoever needs it first."""
    kept: dict[str, WatchedCatalog] = settings.setdefault("gpuspawner_catalogs", {})
    if path not in kept:
        kept[path] = WatchedCatalog(path, log)
    return kept[path]
