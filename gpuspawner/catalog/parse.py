"""From plain values to environments and mounts, or a ConfigError that says what to mend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..reading.origin import Origin
from ..reading.section import Section, device_memory, mapping, truth, whole
from . import kinds
from .about import read_about
from .choices import read_options
from .mounts import check_targets, read_choice, read_dataset, read_shared_folder
from .servers import read_servers
from .values import DeviceLimits, Environment, Mount, SessionHours

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
    items = top.take("environments", kinds.entries)
    for index, item in enumerate(items):
        slug = item.get("slug") if isinstance(item, dict) else None
        label = f"environment {slug!r}" if isinstance(slug, str) else f"environment {index + 1}"
        yield Section(item, top.origin, ("environments", index), label)


def _environment(section: Section, mounts: dict[str, list[str]]) -> Environment:
    slug = section.take("slug", kinds.slug)
    environment = Environment(
        slug=slug,
        display_name=section.take("display_name", kinds.line, slug),
        **read_about(section),
        **_servers(section),
        default=section.take("default", truth, False),
        devices=_devices(section),
        hours=_session_hours(section),
        models=section.take("models", kinds.models, ()),
        min_memory=section.take("min_memory", device_memory, 0),
        min_driver=section.take("min_driver", kinds.version, ""),
        min_cuda=section.take("min_cuda", kinds.version, ""),
        cpu_variant=section.take("cpu_variant", truth, True),
        sharing=section.take("sharing", kinds.sharing, "whole"),
        allowed_groups=section.take("allowed_groups", kinds.groups, None),
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
    chosen = inner.take("default", kinds.hours, None)
    most = inner.take("max", kinds.hours, None)
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
