"""From plain values to environments, options and mounts, or a ConfigError that says what to change.

What decides devices, images and mounts belongs to the lease and to the catalog's own keys;
an override of it would go around them without a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ..core.config_files import (
    Origin,
    Section,
    device_memory,
    mapping,
    positive,
    shown,
    size,
    suggest,
    text,
    texts,
    truth,
    whole,
)
from . import value_kinds
from .files import find, named_file, read_text
from .models import (
    DeviceLimits,
    Environment,
    Framework,
    Link,
    Mount,
    ProfileChoice,
    ProfileOption,
    SessionHours,
)
from .value_kinds import (
    MOST_NAMED,
    NAME,
    day,
    groups,
    inside,
    line,
    long_text,
    mode,
    server_path,
    source,
    target,
    url,
)

_FILES = ("packages", "sample_notebook", "changes")


def read_about(section: Section) -> dict[str, Any]:
    """The descriptive keys of an environment, by name."""
    return {
        "summary": section.take("summary", line, ""),
        "description": section.take("description", long_text, ""),
        "logo": _logo(section),
        "frameworks": tuple(
            Framework(name, version)
            for name, version in _named(section, "frameworks", _framework_version)
        ),
        "links": tuple(Link(title, address) for title, address in _named(section, "links", url)),
        "maintainer": section.take("maintainer", line, ""),
        "tested_on": section.take("tested_on", day, None),
        **{key: _file(section, key) for key in _FILES},
    }


def _named(section: Section, key: str, kind: Any) -> list[tuple[str, Any]]:
    """A mapping of names that people read, each value as ``kind`` makes it, in its order."""
    empty: dict[str, Any] = {}
    found = section.take(key, mapping, empty)
    if len(found) > MOST_NAMED:
        raise section.error(
            key, f"'{key}' of {section.label} has {len(found)} lines; {MOST_NAMED} are the most."
        )
    inner = Section(found, section.origin, (*section.path, key), f"'{key}' of {section.label}")
    for name in found:
        try:
            line(name)
        except ValueError as error:
            raise inner.error(name, f"a name in {inner.label} {error}") from None
    return [(name, inner.take(name, kind)) for name in found]


def _framework_version(value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError(f"is {shown(value)}, a number. Put it in quotes: 2.10 is not 2.1.")
    return line(value)


def _logo(section: Section) -> str:
    """A path of the hub's own host, or a file beside the catalog: never another host's."""
    value = section.take("logo", text, "")
    return section.take("logo", server_path, "") if value[:1] == "/" else _file(section, "logo")


def _file(section: Section, key: str) -> str:
    name = section.take(key, partial(named_file, key), "")
    folder = section.origin.folder
    if name and folder is not None:
        section.take(key, lambda _: _readable(folder, key, name))
    return name


def _readable(folder: Any, key: str, name: str) -> str:
    if key == "logo":
        find(folder, key, name)
    else:
        read_text(folder, key, name)
    return name


def read_dataset(name: str, section: Section) -> Mount:
    return _mount(name, section, f"/datasets/{name}", read_only=True)


def read_shared_folder(name: str, section: Section) -> Mount:
    return _mount(
        name, section, f"/shared/{name}", read_only=section.take("mode", mode, "rw") == "ro"
    )


def read_choice(section: Section, key: str, known: Sequence[str]) -> tuple[str, ...] | None:
    """The names that an environment picks of the datasets or shared folders."""
    what = {"datasets": "dataset", "shared_folders": "shared folder"}[key]
    chosen = section.take(key, texts, None)
    for index, name in enumerate(chosen or ()):
        if name not in known:
            raise section.origin.error(
                (*section.path, key, index),
                f"{section.label} names a {what} {name!r} that is not defined under {key!r}. "
                + suggest(name, known, "Defined"),
            )
    return chosen


def check_targets(origin: Origin, *named: tuple[str, tuple[Mount, ...]]) -> None:
    """No target is another's, or lies inside another's."""
    seen: list[Mount] = []
    for key, mounts in named:
        for mount in mounts:
            for other in seen:
                if inside(mount.target, other.target) or inside(other.target, mount.target):
                    raise origin.error(
                        (key, mount.name, "target"),
                        f"{mount.name!r} would be mounted on {mount.target} and {other.name!r} on "
                        f"{other.target}: one would hide the other. Give one another 'target'.",
                    )
            seen.append(mount)


def _mount(name: str, section: Section, usual: str, *, read_only: bool) -> Mount:
    if not NAME.fullmatch(name):
        raise section.origin.error(
            section.path,
            f"{section.label} needs another name. Use letters, digits, '-', '_' and '.'.",
        )
    mount = Mount(
        name=name,
        source=section.take("source", source),
        target=section.take("target", target, usual),
        read_only=read_only,
        allowed_groups=section.take("allowed_groups", groups, None),
    )
    section.done()
    return mount


OWN_KEYS = ("image", "environment", "mem_limit", "cpu_limit", "shm_size", "default_url")
"""Traits that an environment sets by a key of the same name."""

OWNED_TRAITS = {
    "allowed_images": "the catalog decides which images there are",
    "image_whitelist": "the catalog decides which images there are",
    "device_requests": "the lease decides which devices a server gets",
    "volumes": "mounts come from 'datasets' and 'shared_folders'",
    "read_only_volumes": "mounts come from 'datasets' and 'shared_folders'",
    "mounts": "mounts come from 'datasets' and 'shared_folders'",
    "volume_driver": "mounts come from 'datasets' and 'shared_folders'",
    "user_options": "they are what the member asked for",
    "options_form": "gpuspawner shows its own form",
    "options_from_form": "gpuspawner shows its own form",
    "broker": "it is the hub's own",
}
"""Traits that no environment may set, and why."""

OWNED_INSIDE = {
    "extra_host_config": {
        "device_requests": "the lease decides which devices a server gets",
        "devices": "the lease decides which devices a server gets",
        "device_cgroup_rules": "the lease decides which devices a server gets",
        "runtime": "the spawner's configuration decides how GPUs get into servers",
        "privileged": "a privileged server would see every device",
        "binds": "mounts come from 'datasets' and 'shared_folders'",
        "mounts": "mounts come from 'datasets' and 'shared_folders'",
        "volumes_from": "mounts come from 'datasets' and 'shared_folders'",
        "volume_driver": "mounts come from 'datasets' and 'shared_folders'",
        "shm_size": "the environment has a key of that name",
        "mem_limit": "the environment has a key of that name",
    },
    "extra_create_kwargs": {
        "image": "the environment has a key of that name",
        "environment": "the environment has a key of that name",
        "labels": "the lease is found again by its labels",
        "host_config": "the lease decides which devices a server gets",
        "runtime": "the spawner's configuration decides how GPUs get into servers",
        "volumes": "mounts come from 'datasets' and 'shared_folders'",
    },
}
"""Keys that an environment may not set inside a trait that it may set, and why."""


def read_override(section: Section) -> dict[str, Any]:
    """The section's ``spawner_override``, as written; ConfigError for a trait that is owned."""
    empty: dict[str, Any] = {}
    override = section.take("spawner_override", mapping, empty)
    path = (*section.path, "spawner_override")
    for trait, value in override.items():
        why = OWNED_TRAITS.get(trait, "")
        if trait in OWN_KEYS:
            why = "the environment has a key of that name"
        elif trait.startswith("gpu_"):
            why = "the spawner's configuration decides how GPUs get into servers"
        if why:
            raise section.origin.error(
                (*path, trait),
                f"'spawner_override' of {section.label} may not set {trait!r}: {why}. "
                "Leave it out.",
            )
        owned = OWNED_INSIDE.get(trait, {})
        for key in owned.keys() & (value.keys() if isinstance(value, dict) else ()):
            raise section.origin.error(
                (*path, trait, key),
                f"'spawner_override' of {section.label} may not set {key!r} in {trait!r}: "
                f"{owned[key]}. Leave it out.",
            )
    return override


_KINDS = {
    "image": value_kinds.image,
    "mem_limit": size,
    "cpu_limit": positive,
    "shm_size": size,
}

_REFUSED_VARIABLES = ("NVIDIA_", "CUDA_", "GPUSPAWNER_", "JUPYTERHUB_")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def read_servers(section: Section) -> dict[str, Any]:
    """The keys that are there, by the names of :class:`~gpuspawner.catalog.loader.Environment`."""
    found: dict[str, Any] = {key: section.take(key, kind, None) for key, kind in _KINDS.items()}
    found["default_url"] = _default_url(section)
    found["environment"] = _variables(section)
    found["spawner_override"] = read_override(section)
    return {key: value for key, value in found.items() if value}


def _default_url(section: Section) -> str:
    """``default_url`` as it is, or what ``first_page`` means; empty when there is neither."""
    page = section.take("first_page", value_kinds.first_page, "")
    url = section.take("default_url", value_kinds.server_path, "")
    if page and url:
        raise section.error(
            "first_page", f"{section.label} has both 'first_page' and 'default_url'. Keep one."
        )
    return page or url


def _variables(section: Section) -> dict[str, str]:
    empty: dict[str, Any] = {}
    variables = section.take("environment", mapping, empty)
    for name, value in variables.items():
        problem = ""
        if not _VARIABLE.fullmatch(name):
            problem = "is no name of an environment variable. Use letters, digits and '_'."
        elif name.upper().startswith(_REFUSED_VARIABLES):
            problem = "is set by gpuspawner for every server, and cannot be set here. Leave it out."
        elif not isinstance(value, str):
            problem = f"is {shown(value)}, not text. Put it in quotes."
        elif "\0" in value:
            problem = "holds a character that ends a text. Take it out."
        if problem:
            raise section.origin.error(
                (*section.path, "environment", name),
                f"the variable {name!r} of {section.label} {problem}",
            )
    return variables


MOST_OPTIONS = 10
MOST_CHOICES = 50
OPTION_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,62}[A-Za-z0-9])?"
"""What names an option, and a choice."""


def read_options(section: Section) -> tuple[ProfileOption, ...]:
    """The section's ``profile_options``."""
    _no_more_than(section, "profile_options", MOST_OPTIONS)
    return tuple(
        _option(_name(inner, name), inner)
        for name, inner in section.sections("profile_options", "option")
    )


def _option(name: str, section: Section) -> ProfileOption:
    display_name = section.take("display_name", value_kinds.line, name)
    _no_more_than(section, "choices", MOST_CHOICES)
    choices = tuple(
        _choice(_name(inner, each), inner) for each, inner in section.sections("choices", "choice")
    )
    if not choices:
        raise section.error("choices", f"{section.label} has no 'choices'. Add at least one.")
    if len(defaults := [choice.name for choice in choices if choice.default]) > 1:
        raise section.error(
            "choices",
            f"the choices {defaults[0]!r} and {defaults[1]!r} of {section.label} both say "
            "'default: true'. Keep one of them.",
        )
    section.done()
    return ProfileOption(name=name, display_name=display_name, choices=choices)


def _choice(name: str, section: Section) -> ProfileChoice:
    choice = ProfileChoice(
        name=name,
        display_name=section.take("display_name", value_kinds.line, name),
        default=section.take("default", truth, False),
        changes=read_servers(section),
    )
    section.done()
    return choice


def _name(section: Section, name: str) -> str:
    if not re.fullmatch(OPTION_NAME, name):
        raise section.origin.error(
            section.path,
            f"{shown(name)} cannot be a name here. Use up to 64 letters, digits, '-' and '_'.",
        )
    return name


def _no_more_than(section: Section, key: str, most: int) -> None:
    empty: dict[str, Any] = {}
    count = len(section.take(key, mapping, empty))
    if count > most:
        raise section.error(key, f"{section.label} has {count} {key!r}; {most} are the most.")


_OF_DEVICES = ("models", "min_memory", "min_driver", "min_cuda", "sharing", "hours")
"""Keys that mean nothing where no server gets a device."""


def parse(
    data: object, origin: Origin
) -> tuple[tuple[Environment, ...], tuple[Mount, ...], tuple[Mount, ...]]:
    """Environments, datasets and shared folders of a catalog, in their order."""
    top = Section(data, origin, (), "the catalog")
    datasets = tuple(read_dataset(name, s) for name, s in top.sections("datasets", "dataset"))
    folders = tuple(
        read_shared_folder(name, s) for name, s in top.sections("shared_folders", "shared folder")
    )
    known = {
        "datasets": [dataset.name for dataset in datasets],
        "shared_folders": [folder.name for folder in folders],
    }
    environments = tuple(_environment(section, known) for section in _environment_sections(top))
    top.done()
    check_targets(origin, ("datasets", datasets), ("shared_folders", folders))
    _check_environments(origin, environments)
    return environments, datasets, folders


# Environments.


def _environment_sections(top: Section) -> Iterator[Section]:
    items = top.take("environments", value_kinds.entries)
    for index, item in enumerate(items):
        slug = item.get("slug") if isinstance(item, dict) else None
        label = f"environment {slug!r}" if isinstance(slug, str) else f"environment {index + 1}"
        yield Section(item, top.origin, ("environments", index), label)


def _environment(section: Section, mounts: dict[str, list[str]]) -> Environment:
    slug = section.take("slug", value_kinds.slug)
    environment = Environment(
        slug=slug,
        display_name=section.take("display_name", value_kinds.line, slug),
        **read_about(section),
        **_servers(section),
        default=section.take("default", truth, False),
        devices=_devices(section),
        hours=_session_hours(section),
        models=section.take("models", value_kinds.models, ()),
        min_memory=section.take("min_memory", device_memory, 0),
        min_driver=section.take("min_driver", value_kinds.version, ""),
        min_cuda=section.take("min_cuda", value_kinds.version, ""),
        cpu_variant=section.take("cpu_variant", truth, True),
        sharing=section.take("sharing", value_kinds.sharing, "whole"),
        allowed_groups=section.take("allowed_groups", value_kinds.groups, None),
        datasets=read_choice(section, "datasets", mounts["datasets"]),
        shared_folders=read_choice(section, "shared_folders", mounts["shared_folders"]),
        profile_options=read_options(section),
    )
    section.done()
    _check_devices(section, environment)
    return environment


def _servers(section: Section) -> dict[str, Any]:
    found = read_servers(section)
    if "image" not in found:
        raise section.missing("image")
    return found


def _check_devices(section: Section, environment: Environment) -> None:
    """What is said of devices goes together."""
    said = next((key for key in _OF_DEVICES if key in section.data), None)
    if environment.cpu_only and said:
        raise section.error(
            said,
            f"{section.label} is CPU-only (devices: max: 0), so '{said}' means nothing. Leave it "
            "out, or raise 'max'.",
        )
    if not environment.cpu_variant and not environment.devices.default:
        raise section.error(
            "cpu_variant",
            f"{section.label} says 'cpu_variant: false', but starts without a GPU unless a member "
            "asks for one. Leave it out, or write 'devices: {default: 1}'.",
        )


def _devices(section: Section) -> DeviceLimits:
    """``{default, max}``; either one follows from the other when it is absent."""
    data = section.take("devices", mapping, None)
    if data is None:
        return DeviceLimits()
    inner = Section(
        data, section.origin, (*section.path, "devices"), f"'devices' of {section.label}"
    )
    chosen = inner.take("default", whole, None)
    most = inner.take("max", whole, None)
    inner.done()
    if most is None:
        most = max(1, chosen or 0)
    if chosen is None:
        chosen = min(1, most)
    if chosen > most:
        raise inner.error(
            "default",
            f"'default' of {inner.label} is {chosen}, but 'max' is {most}. Lower the one or raise "
            "the other.",
        )
    return DeviceLimits(default=chosen, max=most)


def _session_hours(section: Section) -> SessionHours:
    """``{default, max}``, in hours; either one may be absent."""
    data = section.take("hours", mapping, None)
    if data is None:
        return SessionHours()
    inner = Section(data, section.origin, (*section.path, "hours"), f"'hours' of {section.label}")
    chosen = inner.take("default", value_kinds.hours, None)
    most = inner.take("max", value_kinds.hours, None)
    inner.done()
    if chosen is not None and most is not None and chosen > most:
        raise inner.error(
            "default",
            f"'default' of {inner.label} is {chosen:g}, but 'max' is {most:g}. Lower the one or "
            "raise the other.",
        )
    return SessionHours(chosen, most)


def _check_environments(origin: Origin, environments: tuple[Environment, ...]) -> None:
    """Slugs are unique, one environment at most is the default, and nobody is locked out."""
    seen: dict[str, int] = {}
    default: str | None = None
    for index, environment in enumerate(environments):
        slug = environment.slug
        if slug in seen:
            raise origin.error(
                ("environments", index, "slug"),
                f"environments {seen[slug] + 1} and {index + 1} have the same slug {slug!r}. Give "
                "one of them another.",
            )
        seen[slug] = index
        if environment.default and default is not None:
            raise origin.error(
                ("environments", index, "default"),
                f"environments {default!r} and {slug!r} both say 'default: true'. Keep one of "
                "them.",
            )
        default = slug if environment.default else default
    for index, environment in enumerate(environments):
        if not environment.cpu_variant and not any(
            _opens_instead(other, environment) for other in environments
        ):
            raise origin.error(
                ("environments", index, "cpu_variant"),
                f"environment {environment.slug!r} says 'cpu_variant: false', and its members have "
                "no other that starts without a GPU: without credits they could not reach their "
                "files. Add one for them, or leave it out.",
            )


def _opens_instead(other: Environment, environment: Environment) -> bool:
    """Whether everybody who may use the one may start the other without a device."""
    if not other.cpu_variant or other.allowed_groups is None:
        return other.cpu_variant
    wanted = environment.allowed_groups
    return wanted is not None and wanted <= other.allowed_groups
