"""Frozen models of the catalog: environments, and their datasets and shared folders.

The models also define the format of the catalog file: they validate it, and its JSON Schema is
generated from them. The parser makes the checks that involve more than one environment.

Sizes are bytes. None leaves a setting to the spawner's configuration. Texts are as the admin wrote
them: pages escape them, and show Markdown through :func:`gpuspawner.catalog.markdown.to_html`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema, model_validator

from ..core.config_models import (
    ConfigModel,
    DeviceMemory,
    Names,
    Positive,
    Schema,
    Size,
    Whole,
    mistake,
)
from ..core.errors import InvalidRequest
from ..core.units import format_bytes
from .value_kinds import (
    Day,
    DeviceModels,
    FirstPage,
    FrameworkVersion,
    Groups,
    Hours,
    ImageName,
    Line,
    Logo,
    LongText,
    OptionName,
    ServerPath,
    Slug,
    Source,
    Target,
    Url,
    VariableName,
    VariableValue,
    Version,
    beside,
)

OWN_KEYS = (
    "image",
    "environment",
    "mem_limit",
    "mem_guarantee",
    "cpu_limit",
    "cpu_guarantee",
    "shm_size",
    "default_url",
)
"""Traits that an environment sets with a key of the same name."""

_DEVICES = "the lease decides which devices a server gets"
_INJECTION = "the spawner's configuration decides how GPUs get into servers"
_MOUNTS = "mounts come from 'datasets' and 'shared_folders'"
_OWN_KEY = "the environment has a key of that name"

OWNED_TRAITS = {
    **dict.fromkeys(
        ("allowed_images", "image_whitelist"), "the catalog decides which images there are"
    ),
    "device_requests": _DEVICES,
    **dict.fromkeys(("volumes", "read_only_volumes", "mounts", "volume_driver"), _MOUNTS),
    "user_options": "they are what the member asked for",
    **dict.fromkeys(("options_form", "options_from_form"), "gpuspawner shows its own form"),
    "services": "it is the hub's own",
}
"""Traits that no environment may set, and the reason."""

OWNED_INSIDE = {
    "extra_host_config": {
        **dict.fromkeys(("device_requests", "devices", "device_cgroup_rules"), _DEVICES),
        "runtime": _INJECTION,
        "privileged": "a privileged server would see every device",
        **dict.fromkeys(("binds", "mounts", "volumes_from", "volume_driver"), _MOUNTS),
        **dict.fromkeys(("shm_size", "mem_limit"), _OWN_KEY),
    },
    "extra_create_kwargs": {
        **dict.fromkeys(("image", "environment"), _OWN_KEY),
        "labels": "the lease is found again by its labels",
        "host_config": _DEVICES,
        "runtime": _INJECTION,
        "volumes": _MOUNTS,
    },
}
"""Keys that no environment may set in traits that it may set, and the reason."""


def check_override(override: dict[str, Any]) -> dict[str, Any]:
    """Return the override. Raises PydanticCustomError if it sets a forbidden trait or key."""
    for trait, value in override.items():
        why = OWNED_TRAITS.get(trait, "")
        if trait in OWN_KEYS:
            why = _OWN_KEY
        elif trait.startswith("gpu_"):
            why = _INJECTION
        if why:
            raise mistake(f"may not set {trait!r}: {why}. Leave it out.", trait)
        owned = OWNED_INSIDE.get(trait, {})
        for key in owned.keys() & (value.keys() if isinstance(value, dict) else ()):
            raise mistake(
                f"may not set {key!r} in {trait!r}: {owned[key]}. Leave it out.", trait, key
            )
    return override


OVERRIDE_SCHEMA: Schema = {
    "type": "object",
    "propertyNames": {
        "not": {"anyOf": [{"enum": sorted({*OWN_KEYS, *OWNED_TRAITS})}, {"pattern": "^gpu_"}]}
    },
    "properties": {
        trait: {"propertyNames": {"not": {"enum": sorted(keys)}}}
        for trait, keys in OWNED_INSIDE.items()
    },
}


MOST_NAMED = 50
"""Maximum number of frameworks, and of links, of one environment."""
MOST_OPTIONS = 10
MOST_CHOICES = 50

Variables = dict[VariableName, VariableValue]
Override = Annotated[
    dict[str, Any], AfterValidator(check_override), WithJsonSchema(OVERRIDE_SCHEMA)
]


def _first_page_of(fields: Mapping[str, Any]) -> str:
    """Return the default of ``default_url``, which is the URL that ``first_page`` means."""
    return fields.get("first_page") or "/lab"


class _ServerSettings(ConfigModel):
    """What is common to an environment and to what changes it."""

    model_config = ConfigDict(
        json_schema_extra={"not": {"required": ["first_page", "default_url"]}}
    )

    @model_validator(mode="after")
    def _check_pages(self) -> _ServerSettings:
        if {"first_page", "default_url"} <= self.model_fields_set:
            raise mistake("has both 'first_page' and 'default_url'. Keep one.", "first_page")
        return self


class ProfileChoice(_ServerSettings):
    """One way to have an option: what the environment has in place of its own."""

    display_name: Line = ""
    """What members read. Without it: the name."""
    default: bool = False
    """Taken unless a member chooses."""
    image: ImageName = ""
    mem_limit: Size | None = None
    mem_guarantee: Size | None = None
    cpu_limit: Positive | None = None
    cpu_guarantee: Positive | None = None
    shm_size: Size | None = None
    first_page: FirstPage = ""
    default_url: ServerPath = Field(default_factory=_first_page_of)
    environment: Variables = {}
    spawner_override: Override = {}

    @property
    def changes(self) -> dict[str, Any]:
        """The fields of the environment that this choice replaces, with its values."""
        said = self.model_fields_set - {"display_name", "default", "first_page"}
        said |= {"default_url"} if self.first_page else set()
        found = {key: getattr(self, key) for key in type(self).model_fields if key in said}
        return {key: value for key, value in found.items() if value}


def _check_defaults(choices: dict[str, ProfileChoice]) -> dict[str, ProfileChoice]:
    defaults = [name for name, choice in choices.items() if choice.default]
    if len(defaults) > 1:
        raise mistake(
            f"has {defaults[0]!r} and {defaults[1]!r}, which both say 'default: true'. Keep one of "
            "them."
        )
    return choices


class ProfileOption(ConfigModel):
    """Something to choose, such as how much memory."""

    display_name: Line = ""
    """What members read. Without it: the name."""
    choices: Annotated[
        dict[OptionName, ProfileChoice],
        Field(min_length=1, max_length=MOST_CHOICES),
        AfterValidator(_check_defaults),
    ]
    """By the names that links and requests carry."""

    @property
    def usual(self) -> str:
        """The preselected choice: the default or the first."""
        names = (name for name, choice in self.choices.items() if choice.default)
        return next(names, next(iter(self.choices)))


class DeviceLimits(ConfigModel):
    """How many devices a server of an environment gets."""

    default: Whole = 1
    """Chosen on the form unless the member chooses another number."""
    max: Whole = 1
    """The most that a member may ask for; 0 makes the environment CPU-only."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """Derive a missing ``max`` from ``default``, and a missing ``default`` from ``max: 0``."""
        if isinstance(data, dict) and "max" not in data and isinstance(data.get("default"), int):
            return {**data, "max": max(1, data["default"])}
        if isinstance(data, dict) and "default" not in data and data.get("max") == 0:
            return {**data, "default": 0}
        return data

    @model_validator(mode="after")
    def _check_order(self) -> DeviceLimits:
        return _ordered(self)


class SessionHours(ConfigModel):
    """How long a server with a device may run, in hours."""

    default: Hours | None = None
    """Unless the member says how long. Without it: as the spawner's configuration says."""
    max: Hours | None = None
    """The most that a member may ask for. Without it: as the spawner's configuration says."""


def _ordered(limits: Any) -> Any:
    if limits.default is not None and limits.max is not None and limits.default > limits.max:
        raise mistake(
            f"says that 'default' is {limits.default:g}, but 'max' is {limits.max:g}. Lower the "
            "one or raise the other.",
            "default",
        )
    return limits


_OF_DEVICES = ("models", "min_memory", "min_driver", "min_cuda", "sharing", "hours")
"""Keys that have no effect in a CPU-only environment."""


class Environment(_ServerSettings):
    """An entry of the catalog: an image with a name, and who may use it with what."""

    slug: Slug
    """The name that requests, links, leases and labels carry."""
    display_name: Line = Field(default_factory=lambda fields: fields.get("slug", ""))
    """What members read. Without it: the slug."""
    summary: Line = ""
    """One line for the environment's card."""
    description: LongText = ""
    """What it is for and how to use it, in Markdown."""
    logo: Logo = ""
    """A picture beside the catalog, or a path on the hub's own host (/...)."""
    image: ImageName
    """The container image, by tag and, to pin it, by digest."""
    default: bool = False
    """Chosen on the form unless a member chooses another. One environment at most says so."""
    frameworks: Annotated[dict[Line, FrameworkVersion], Field(max_length=MOST_NAMED)] = {}
    """What comes with it and in which version, in quotes."""
    links: Annotated[dict[Line, Url], Field(max_length=MOST_NAMED)] = {}
    """Where to read more: a title, and an address or a path of the hub's host."""
    maintainer: Line = ""
    """Whom to ask about it."""
    tested_on: Day | None = None
    """The day it was last tried."""
    packages: Annotated[str, beside(".txt", ".lock")] = ""
    """A file beside the catalog: a list of packages, name==version a line."""
    sample_notebook: Annotated[str, beside(".ipynb")] = ""
    """A notebook beside the catalog."""
    changes: Annotated[str, beside(".md", ".txt")] = ""
    """A Markdown file beside the catalog: what is new."""
    devices: DeviceLimits = DeviceLimits()
    """GPUs: chosen unless a member says how many, and the most. max: 0 is CPU-only."""
    hours: Annotated[SessionHours, AfterValidator(_ordered)] = Field(default_factory=SessionHours)
    """Hours of a session: as usual, and the most."""
    models: DeviceModels = ()
    """Only these GPU models: parts of their names, such as A100. Without it: any."""
    min_memory: DeviceMemory = 0
    """Least memory of each GPU, as on its box, or of a share of one. A member can ask for more with
    gpu_memory."""
    min_driver: Version = ""
    """The oldest NVIDIA driver that it runs on, such as '550.54', in quotes."""
    min_cuda: Version = ""
    """The oldest CUDA version that the driver must offer, such as '12.4', in quotes."""
    cpu_variant: bool = True
    """Whether it can be started without a GPU."""
    sharing: Literal["whole", "slot", "any"] = "whole"
    """How its servers hold GPUs: whole ones, a share of one ('slot'), or as the member chooses. A
    share has as many slots of a shared GPU as its memory needs."""
    allowed_groups: Groups | None = None
    """Members of any of these groups may use it. Without it: everyone."""
    mem_limit: Size | None = None
    """The most memory of a server."""
    mem_guarantee: Size | None = None
    """Memory that is kept free for a server while it runs."""
    cpu_limit: Positive | None = None
    """The most CPU cores of a server."""
    cpu_guarantee: Positive | None = None
    """CPU cores that are kept free for a server while it runs."""
    shm_size: Size | None = None
    """/dev/shm of a server."""
    first_page: FirstPage = ""
    """What opens first: lab, notebook, vscode, or a file such as work/intro.ipynb."""
    default_url: ServerPath = Field(default_factory=_first_page_of)
    """Where a server opens, as its path."""
    environment: Variables = {}
    """Environment variables on top of the spawner's, each as text."""
    datasets: Names | None = None
    """Only these datasets. Without it: all, each for the groups it allows."""
    shared_folders: Names | None = None
    """Only these shared folders. Without it: all, each for the groups it allows."""
    spawner_override: Override = {}
    """Other traits of the spawner, as in KubeSpawner's profile_list."""
    profile_options: Annotated[dict[OptionName, ProfileOption], Field(max_length=MOST_OPTIONS)] = {}
    """Choices within it, as in KubeSpawner's profile_options."""

    def __hash__(self) -> int:
        return hash(self.slug)

    @model_validator(mode="after")
    def _check_devices(self) -> Environment:
        """Reject settings of devices that contradict each other."""
        said = next((key for key in _OF_DEVICES if key in self.model_fields_set), None)
        if self.cpu_only and said:
            raise mistake(
                f"is CPU-only (devices: max: 0), so '{said}' means nothing. Leave it out, or raise "
                "'max'.",
                said,
            )
        if not self.cpu_variant and not self.devices.default:
            raise mistake(
                "says 'cpu_variant: false', but starts without a GPU unless a member asks for one. "
                "Leave it out, or write 'devices: {default: 1}'.",
                "cpu_variant",
            )
        if self.sharing == "slot" and self.devices.max > 1:
            raise mistake(
                f"says 'sharing: slot', so a server gets a share of one GPU, but up to "
                f"{self.devices.max} GPUs. Leave out 'max', or write 'sharing: any'.",
                "sharing",
            )
        return self

    @model_validator(mode="after")
    def _check_guarantees(self) -> Environment:
        """Reject a guarantee above its limit, whatever a member chooses of the options."""
        choices = [option.choices.values() for option in self.profile_options.values()]
        keys = ("mem_guarantee", "mem_limit", format_bytes), ("cpu_guarantee", "cpu_limit", str)
        for guarantee, limit, written in keys:
            found = {(getattr(self, guarantee), getattr(self, limit))}
            for some in choices:
                found = {
                    (getattr(choice, guarantee) or kept, getattr(choice, limit) or most)
                    for kept, most in found
                    for choice in some
                }
            for kept, most in found:
                if kept and most and kept > most:
                    where = ", with some of its options," if choices else ""
                    raise mistake(
                        f"has{where} a '{guarantee}' of {written(kept)}, but a '{limit}' of "
                        f"{written(most)}. Lower the one or raise the other.",
                        guarantee,
                    )
        return self

    @property
    def cpu_only(self) -> bool:
        """True if servers never get a device."""
        return self.devices.max == 0

    @property
    def has_whole_devices(self) -> bool:
        """True if its servers may get whole devices."""
        return not self.cpu_only and self.sharing != "slot"

    @property
    def has_slots(self) -> bool:
        """True if its servers may get a share of a device."""
        return not self.cpu_only and self.sharing != "whole"

    @property
    def image_digest(self) -> str:
        """``sha256:...`` if the image is pinned, else empty."""
        return self.image.partition("@")[2]

    @property
    def images(self) -> tuple[str, ...]:
        """The environment's image, and the images of its choices."""
        options = self.profile_options.values()
        chosen = (each.image for option in options for each in option.choices.values())
        return tuple(dict.fromkeys((self.image, *filter(None, chosen))))

    def with_options(self, chosen: Mapping[str, str]) -> Environment:
        """Return a copy with the chosen options, which are names of choices by names of options.

        Other options have their preselected choice. Raises InvalidRequest for an unknown option or
        choice.
        """
        if unknown := [name for name in chosen if name not in self.profile_options]:
            known = ", ".join(self.profile_options)
            there = f"Its options are: {known}." if known else "It has none."
            raise InvalidRequest(
                f"{self.display_name} has no option {unknown[0][:60]!r}. {there}", field="options"
            )
        made: dict[str, Any] = {}
        for name, option in self.profile_options.items():
            wanted = chosen.get(name, option.usual)
            choice = option.choices.get(wanted)
            if choice is None:
                raise InvalidRequest(
                    f"{self.display_name} has no {wanted[:60]!r} for {name!r}. Choose one of: "
                    f"{', '.join(option.choices)}.",
                    field="options",
                )
            for key, value in choice.changes.items():
                if isinstance(value, Mapping):
                    value = {**made.get(key, getattr(self, key)), **value}
                made[key] = value
        return self.model_copy(update=made) if made else self

    def visible_to(self, groups: Collection[str]) -> bool:
        """Return True if a member of ``groups`` may use this environment."""
        return _allowed(self.allowed_groups, groups)


class Dataset(ConfigModel):
    """Read-only data for servers."""

    source: Source
    """A folder on the host, or the name of a volume."""
    target: Target = ""
    """Where servers find it. Without it: /datasets/NAME."""
    allowed_groups: Groups | None = None
    """Only servers of members of these groups get it. Without it: everyone's."""


class SharedFolder(Dataset):
    """A folder that members share."""

    target: Target = ""
    """Where servers find it. Without it: /shared/NAME."""
    mode: Literal["rw", "ro"] = "rw"
    """rw may be written, ro not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A dataset (always read-only) or a shared folder, and its path inside servers."""

    name: str
    source: str
    """An absolute path on the host, or the name of a volume of the engine."""
    target: str
    """An absolute path inside the server."""
    read_only: bool = True
    allowed_groups: frozenset[str] | None = None
    """Servers of members of any of these groups get the mount; None for everyone's servers."""

    @property
    def is_volume(self) -> bool:
        """True if the source is the name of a volume and not a path on the host."""
        return not self.source.startswith("/")

    def visible_to(self, groups: Collection[str]) -> bool:
        """Return True if the servers of a member of ``groups`` get this mount."""
        return _allowed(self.allowed_groups, groups)


def _allowed(allowed: frozenset[str] | None, groups: Collection[str]) -> bool:
    return allowed is None or not allowed.isdisjoint(groups)
