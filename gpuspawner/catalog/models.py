"""What the catalog speaks of, as frozen values: environments, and the mounts they get."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any, NamedTuple

from ..core.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileChoice:
    """One way to have an option."""

    name: str
    """What links and requests carry."""
    display_name: str
    default: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Fields of the environment that it has in place of the environment's own; variables and
    overrides are added to those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOption:
    """Something to choose, such as how much memory."""

    name: str
    display_name: str
    choices: tuple[ProfileChoice, ...]

    @property
    def usual(self) -> ProfileChoice:
        """The one that is taken unless a member chooses: the default, else the first."""
        return next((choice for choice in self.choices if choice.default), self.choices[0])


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """How many devices a server of an environment gets."""

    default: int = 1
    """Chosen on the form unless the member chooses another number."""
    max: int = 1
    """The most that a member may ask for; 0 makes the environment CPU-only."""


@dataclass(frozen=True, slots=True)
class SessionHours:
    """How long a server with a device may run, in hours."""

    default: float | None = None
    """Unless the member says how long; None leaves it to the spawner's configuration."""
    max: float | None = None
    """The most that a member may ask for; None leaves it to the spawner's configuration."""


class Framework(NamedTuple):
    """Something that comes with an environment, such as PyTorch 2.5.1."""

    name: str
    version: str


class Link(NamedTuple):
    """Where to read more."""

    title: str
    url: str
    """``https://``, ``http://`` or ``mailto:``, or a path on the hub's own host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An entry of the catalog: an image with a name, and who may use it with what.

    All sizes are bytes. ``None`` leaves a setting to the spawner's configuration. Texts are
    as the admin wrote them: pages escape them, and show Markdown through
    :func:`gpuspawner.catalog.markdown.to_html`.
    """

    slug: str
    """The name that requests, leases and labels carry: ``[a-z0-9-]``."""
    display_name: str
    summary: str = ""
    """One line of plain text, for a card."""
    description: str = ""
    """Markdown."""
    logo: str = ""
    """The name of a file beside the catalog, or a path on the hub's own host (``/...``)."""
    image: str = ""
    """Empty only in the built-in catalog of a hub without one: the spawner's own image."""
    default: bool = False
    """Whether the form chooses it unless the member chooses another."""
    frameworks: tuple[Framework, ...] = ()
    links: tuple[Link, ...] = ()
    maintainer: str = ""
    tested_on: date | None = None
    packages: str = ""
    """The name of a file beside the catalog: a list of packages, ``name==version`` a line."""
    sample_notebook: str = ""
    """The name of a notebook beside the catalog."""
    changes: str = ""
    """The name of a Markdown file beside the catalog: what is new."""
    devices: DeviceLimits = DeviceLimits()
    hours: SessionHours = SessionHours()
    models: tuple[str, ...] = ()
    """Parts of device models' names, such as ``A100``; empty allows any model."""
    min_memory: int = 0
    """Least memory of each device."""
    min_driver: str = ""
    """The oldest NVIDIA driver that it runs on, such as ``550.54``; empty is any."""
    min_cuda: str = ""
    """The oldest CUDA version that the driver must offer, such as ``12.4``; empty is any."""
    cpu_variant: bool = True
    """Whether it can be started without a device."""
    sharing: str = "whole"
    """How its servers hold devices; ``whole`` is the only way so far."""
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
    shared_folders: tuple[str, ...] | None = None
    """The same for the shared folders."""
    spawner_override: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Traits of the spawner to set for this environment, as the admin wrote them."""
    profile_options: tuple[ProfileOption, ...] = ()
    """What a member may choose within it."""

    @property
    def cpu_only(self) -> bool:
        return self.devices.max == 0

    @property
    def card_text(self) -> str:
        """The summary, or else the description's first paragraph; plain text."""
        from .markdown import first_words  # slow to import, and few processes show cards

        return self.summary or first_words(self.description)

    @property
    def image_digest(self) -> str:
        """``sha256:...`` when the image is pinned, else empty."""
        return self.image.partition("@")[2]

    @property
    def image_tag(self) -> str:
        """The image's tag, empty when it has none."""
        name = self.image.partition("@")[0].rpartition("/")[2]
        return name.partition(":")[2]

    @property
    def images(self) -> tuple[str, ...]:
        """Its image, and those of the choices within it."""
        chosen = (
            choice.changes["image"]
            for option in self.profile_options
            for choice in option.choices
            if "image" in choice.changes
        )
        return tuple(dict.fromkeys((self.image, *chosen)))

    def with_options(self, chosen: Mapping[str, str]) -> Environment:
        """The environment as these choices make it: names of choices by names of options.

        What is not said is as usual. Raises InvalidRequest for what there is not.
        """
        self._check_options(chosen)
        made: dict[str, Any] = {}
        for option in self.profile_options:
            wanted = chosen.get(option.name, option.usual.name)
            choice = next((each for each in option.choices if each.name == wanted), None)
            if choice is None:
                names = ", ".join(each.name for each in option.choices)
                raise InvalidRequest(
                    f"{self.display_name} has no {wanted[:60]!r} for {option.name!r}. Choose one "
                    f"of: {names}.",
                    field="options",
                )
            for key, value in choice.changes.items():
                if isinstance(value, Mapping):
                    value = {**made.get(key, getattr(self, key)), **value}
                made[key] = value
        return replace(self, **made) if made else self

    def _check_options(self, chosen: Mapping[str, str]) -> None:
        known = [option.name for option in self.profile_options]
        for name in chosen:
            if name not in known:
                there = f"There are: {', '.join(known)}." if known else "It has none."
                raise InvalidRequest(
                    f"{self.display_name} has no option {name[:60]!r}. {there}", field="options"
                )

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
