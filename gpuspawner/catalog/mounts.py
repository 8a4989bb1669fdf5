"""Datasets and shared folders, from plain values."""

from __future__ import annotations

from collections.abc import Sequence

from ..reading.origin import Origin
from ..reading.section import Section, suggest, texts
from .kinds import NAME, groups, inside, mode, source, target
from .values import Mount


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
