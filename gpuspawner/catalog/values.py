"""What the catalog speaks of, as frozen values: environments, and the mounts they get."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """How many devices a server of an environment gets."""

    default: int = 1
    """Chosen on the form unless the member chooses another number."""
    max: int = 1
    """The most that a member may ask for; 0 makes the environment CPU-only."""


MOST_HOURS = 8760
"""The longest session that anything may ask for or allow: a year."""


@dataclass(frozen=True, slots=True)
class SessionHours:
    """How long a server with a device may run, in hours."""

    default: float | None = None
    """Unless the member says how long; None leaves it to the spawner's configuration."""
    max: float | None = None
    """The most that a member may ask for; None leaves it to the spawner's configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An entry of the catalog: an image with a name, and who may use it with what.

    All sizes are bytes. ``None`` leaves a setting to the spawner's configuration.
    """

    slug: str
    """The name that requests, leases and labels carry: ``[a-z0-9-]``."""
    display_name: str
    description: str = ""
    image: str = ""
    """Empty only in the built-in catalog of a hub without one: the spawner's own image."""
    default: bool = False
    """Whether the form chooses it unless the member chooses another."""
    devices: DeviceLimits = DeviceLimits()
    hours: SessionHours = SessionHours()
    models: tuple[str, ...] = ()
    """Parts of device models' names, such as ``A100``; empty allows any model."""
    min_memory: int = 0
    """Least memory of each device."""
    allowed_groups: frozenset[str] | None = None
    """Members of any of these groups may use it; None is everyone."""
    mem_limit: int | None = None
    cpu_limit: float | None = None
    shm_size: int | None = None
    default_url: str = "/lab"
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Environment variables on top of the spawner's."""
    datasets: tuple[str, ...] | None = None
    """Names of the datasets to mount; None mounts all, each for the groups it allows."""
    spawner_override: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Traits of the spawner to set for this environment, as the admin wrote them."""

    @property
    def cpu_only(self) -> bool:
        return self.devices.max == 0

    def visible_to(self, groups: Collection[str]) -> bool:
        """Whether a member of ``groups`` may use this environment."""
        return _allowed(self.allowed_groups, groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A dataset (always read-only) or a shared folder, and where servers find it."""

    name: str
    source: str
    """An absolute path on the host, or the name of a volume of the engine."""
    target: str
    """An absolute path inside the server."""
    read_only: bool = True
    allowed_groups: frozenset[str] | None = None
    """Members of any of these groups get it; None is everyone."""

    @property
    def is_volume(self) -> bool:
        """Whether the source is the name of a volume and not a path on the host."""
        return not self.source.startswith("/")

    def visible_to(self, groups: Collection[str]) -> bool:
        """Whether the servers of a member of ``groups`` get this mount."""
        return _allowed(self.allowed_groups, groups)


def _allowed(allowed: frozenset[str] | None, groups: Collection[str]) -> bool:
    return allowed is None or not allowed.isdisjoint(groups)
