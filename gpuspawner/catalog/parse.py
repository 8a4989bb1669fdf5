"""From plain values to environments and mounts, or a ConfigError that says what to mend."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from typing import Any

from .overrides import read_override
from .reading import (
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
from .values import MOST_HOURS, DeviceLimits, Environment, Mount, SessionHours

WORKSPACE = "/home/jovyan/work"
"""Where every server finds the member's workspace."""

_RESERVED_TARGETS = (WORKSPACE, "/proc", "/sys", "/dev")
_REFUSED_VARIABLES = ("NVIDIA_", "CUDA_", "GPUSPAWNER_", "JUPYTERHUB_")

_SLUG = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:@-]*")


def parse(
    data: object, origin: Origin
) -> tuple[tuple[Environment, ...], tuple[Mount, ...], tuple[Mount, ...]]:
    """Environments, datasets and shared folders of a catalog, in their order."""
    top = Section(data, origin, (), "the catalog")
    datasets = tuple(_dataset(name, s) for name, s in top.sections("datasets", "dataset"))
    folders = tuple(
        _shared_folder(name, s) for name, s in top.sections("shared_folders", "shared folder")
    )
    environments = tuple(
        _environment(section, [dataset.name for dataset in datasets])
        for section in _environment_sections(top)
    )
    top.done()
    _check_targets(origin, ("datasets", datasets), ("shared_folders", folders))
    _check_environments(origin, environments)
    return environments, datasets, folders


# Environments.


def _environment_sections(top: Section) -> Iterator[Section]:
    items = top.take("environments", _entries)
    for index, item in enumerate(items):
        slug = item.get("slug") if isinstance(item, dict) else None
        label = f"environment {slug!r}" if isinstance(slug, str) else f"environment {index + 1}"
        yield Section(item, top.origin, ("environments", index), label)


def _environment(section: Section, dataset_names: list[str]) -> Environment:
    slug = section.take("slug", _slug)
    environment = Environment(
        slug=slug,
        display_name=section.take("display_name", text, slug),
        description=section.take("description", text, ""),
        image=section.take("image", _image),
        default=section.take("default", truth, False),
        devices=_devices(section),
        hours=_session_hours(section),
        models=section.take("models", _models, ()),
        min_memory=section.take("min_memory", device_memory, 0),
        allowed_groups=section.take("allowed_groups", _groups, None),
        mem_limit=section.take("mem_limit", size, None),
        cpu_limit=section.take("cpu_limit", positive, None),
        shm_size=section.take("shm_size", size, None),
        default_url=section.take("default_url", _url, "/lab"),
        environment=_variables(section),
        datasets=_dataset_choice(section, dataset_names),
        spawner_override=read_override(section),
    )
    section.done()
    of_devices = {
        "models": environment.models,
        "min_memory": environment.min_memory,
        "hours": environment.hours != SessionHours(),
    }
    if environment.cpu_only and any(of_devices.values()):
        key = next(key for key, value in of_devices.items() if value)
        raise section.error(
            key,
            f"{section.label} is CPU-only (devices: max: 0), so '{key}' means nothing. Leave it "
            "out, or raise 'max'.",
        )
    return environment


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
    chosen = inner.take("default", _hours, None)
    most = inner.take("max", _hours, None)
    inner.done()
    if chosen is not None and most is not None and chosen > most:
        raise inner.error(
            "default",
            f"'default' of {inner.label} is {chosen:g}, but 'max' is {most:g}. Lower the one or "
            "raise the other.",
        )
    return SessionHours(chosen, most)


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
        if problem:
            raise section.origin.error(
                (*section.path, "environment", name),
                f"the variable {name!r} of {section.label} {problem}",
            )
    return variables


def _dataset_choice(section: Section, known: list[str]) -> tuple[str, ...] | None:
    chosen = section.take("datasets", texts, None)
    for index, name in enumerate(chosen or ()):
        if name not in known:
            raise section.origin.error(
                (*section.path, "datasets", index),
                f"{section.label} names a dataset {name!r} that is not defined under 'datasets'. "
                + suggest(name, known, "Defined"),
            )
    return chosen


def _check_environments(origin: Origin, environments: tuple[Environment, ...]) -> None:
    """Slugs are unique, and at most one environment is the default."""
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


# Datasets and shared folders.


def _dataset(name: str, section: Section) -> Mount:
    return _mount(name, section, f"/datasets/{name}", read_only=True)


def _shared_folder(name: str, section: Section) -> Mount:
    return _mount(
        name, section, f"/shared/{name}", read_only=section.take("mode", _mode, "rw") == "ro"
    )


def _mount(name: str, section: Section, target: str, *, read_only: bool) -> Mount:
    if not _NAME.fullmatch(name):
        raise section.origin.error(
            section.path,
            f"{section.label} needs another name. Use letters, digits, '-', '_' and '.'.",
        )
    mount = Mount(
        name=name,
        source=section.take("source", _source),
        target=section.take("target", _target, target),
        read_only=read_only,
        allowed_groups=section.take("allowed_groups", _groups, None),
    )
    section.done()
    return mount


def _check_targets(origin: Origin, *groups: tuple[str, tuple[Mount, ...]]) -> None:
    """No target is another's, or lies inside another's."""
    seen: list[Mount] = []
    for key, mounts in groups:
        for mount in mounts:
            for other in seen:
                if _inside(mount.target, other.target) or _inside(other.target, mount.target):
                    raise origin.error(
                        (key, mount.name, "target"),
                        f"{mount.name!r} would be mounted on {mount.target} and {other.name!r} on "
                        f"{other.target}: one would hide the other. Give one another 'target'.",
                    )
            seen.append(mount)


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


# Kinds of values, for Section.take.


def _entries(value: object) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"is {shown(value)}, not a list of environments. Write at least one.")
    return value


def _hours(value: object) -> float:
    hours = positive(value)
    if hours > MOST_HOURS:
        raise ValueError(f"is {shown(value)} hours; {MOST_HOURS}, a year, is the most.")
    return hours


def _slug(value: object) -> str:
    slug = text(value)
    if not _SLUG.fullmatch(slug):
        raise ValueError(
            f"is {shown(slug)}. Use up to 63 lowercase letters, digits and '-', such as "
            "'pytorch-2'."
        )
    return slug


def _image(value: object) -> str:
    image = text(value)
    if not _IMAGE.fullmatch(image):
        raise ValueError(
            f"is {shown(image)}, not the name of an image. Write it as registry/name:tag."
        )
    return image


def _models(value: object) -> tuple[str, ...]:
    models = texts(value)
    for model in models:
        if not re.search(r"[A-Za-z0-9]", model):
            raise ValueError(
                f"holds {model!r}, which names no device model. Leave 'models' out to allow any."
            )
    if not models:
        raise ValueError("is empty. Leave it out to allow any model.")
    return models


def _groups(value: object) -> frozenset[str]:
    groups = texts(value)
    if not groups:
        raise ValueError("is empty, so nobody is allowed. Leave it out to allow everyone.")
    return frozenset(groups)


def _url(value: object) -> str:
    url = text(value)
    if not url.startswith("/") or url.startswith("//"):
        raise ValueError(f"is {shown(url)}. Write a path that starts with one '/', such as /lab.")
    return url


def _mode(value: object) -> str:
    if value not in ("rw", "ro"):
        raise ValueError(f"is {shown(value)}. Write rw (may be written) or ro (read-only).")
    return str(value)


def _source(value: object) -> str:
    source = text(value)
    if "{" in source or "}" in source:
        raise ValueError(
            f"is {shown(source)}, but names in braces are not filled in here: the source is the "
            "same for everybody. Write the path or volume itself."
        )
    if source.startswith("/"):
        if ":" in source or posixpath.normpath(source) == "/" or ".." in source.split("/"):
            raise ValueError(f"is {shown(source)}. Write the absolute path of one folder.")
        return posixpath.normpath(source)
    if not _NAME.fullmatch(source):
        raise ValueError(
            f"is {shown(source)}. Write an absolute path on the host, or the name of a volume."
        )
    return source


def _target(value: object) -> str:
    target = text(value)
    if not target.startswith("/") or ":" in target or ".." in target.split("/"):
        raise ValueError(f"is {shown(target)}. Write an absolute path such as /datasets/images.")
    target = "/" + posixpath.normpath(target).lstrip("/")
    for reserved in _RESERVED_TARGETS:
        if _inside(target, reserved) or _inside(reserved, target):
            raise ValueError(
                f"is {shown(target)}, which would hide {reserved}. Choose a path such as "
                "/datasets/images."
            )
    return target
