"""Parse plain values into environments and mounts, or raise a ConfigError that says what to change.

The models check single values. The checks here compare several entries or read files beside the
catalog, so the JSON Schema does not contain them.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import FailFast, Field

from ..core.config_files import Origin, read_bytes, shown, suggest
from ..core.config_models import ConfigModel, Schema, json_schema, read_model
from .models import Dataset, Environment, Mount, SharedFolder
from .value_kinds import MountName, is_inside, plain_path

MOST_BYTES = {
    "logo": 200_000,
    "packages": 1_000_000,
    "sample_notebook": 2_000_000,
    "changes": 200_000,
}
"""Maximum size of a file in bytes, by the key that names it."""


def find(folder: Path, key: str, name: str) -> Path:
    """Return the path of a file beside a catalog. Raises ValueError with the end of a sentence."""
    try:
        inner = folder.resolve(strict=True)
        path = (inner / plain_path(name)).resolve(strict=True)
        found = path.stat()
    except (OSError, RuntimeError) as error:  # a loop of links can be a RuntimeError
        why = error.strerror if isinstance(error, OSError) else "its links form a loop"
        raise ValueError(
            f"names {shown(name)}, which cannot be read beside the catalog: {why}. Put the file "
            "there, or remove the key."
        ) from None
    if not path.is_relative_to(inner):
        raise ValueError(
            f"names {shown(name)}, a link that leads out of the catalog's folder. Put the file "
            "itself there."
        )
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"names {shown(name)}, which is not a regular file. Name one that is.")
    most = MOST_BYTES[key]
    if found.st_size > most:
        raise ValueError(
            f"names {shown(name)}, a file of {found.st_size} bytes; at most {most} are allowed. "
            "Make it smaller."
        )
    return path


def read(folder: Path, key: str, name: str) -> bytes:
    """Return a file's content. Raises ValueError as :func:`find` does, or if it cannot be read."""
    path = find(folder, key, name)
    try:
        return read_bytes(path, MOST_BYTES[key])
    except OSError as error:
        raise ValueError(f"names {shown(name)}, which cannot be read: {error.strerror}.") from None


def read_text(folder: Path, key: str, name: str) -> str:
    """Return a file's content as text. Raises ValueError as :func:`read` does, or if not UTF-8."""
    try:
        return read(folder, key, name).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(
            f"names {shown(name)}, which is not text in UTF-8. Save it as UTF-8."
        ) from None


NOUNS = {
    "environments": "environment",
    "datasets": "dataset",
    "shared_folders": "shared folder",
    "profile_options": "option",
    "choices": "choice",
}
"""The word for an entry of a list or mapping, by its key."""


class CatalogDocument(ConfigModel):
    """The environments of a hub, and the data that their servers find."""

    environments: Annotated[list[Environment], Field(min_length=1), FailFast()]
    """The environments that members choose from, in this order."""
    datasets: dict[MountName, Dataset] = {}
    """Read-only data for servers, each found under /datasets/NAME."""
    shared_folders: dict[MountName, SharedFolder] = {}
    """Folders that members share, each found under /shared/NAME."""


def schema() -> Schema:
    """Return the JSON Schema of a catalog file."""
    found = json_schema(CatalogDocument, "gpuspawner's catalog of environments")
    own = found["$defs"]["Environment"]["properties"]
    for key, value in found["$defs"]["ProfileChoice"]["properties"].items():
        value.setdefault("description", own[key].get("description"))
    return found


def parse(
    data: object, origin: Origin
) -> tuple[tuple[Environment, ...], tuple[Mount, ...], tuple[Mount, ...]]:
    """Return the environments, datasets and shared folders of a catalog. Raises ConfigError."""
    read = read_model(CatalogDocument, data, origin, "the catalog", NOUNS)
    datasets = tuple(_mount(name, each, "/datasets") for name, each in read.datasets.items())
    folders = tuple(_mount(name, each, "/shared") for name, each in read.shared_folders.items())
    for index, environment in enumerate(read.environments):
        _check_names(origin, index, environment, "datasets", read.datasets)
        _check_names(origin, index, environment, "shared_folders", read.shared_folders)
        if origin.folder is not None:
            _check_files(origin, index, environment, origin.folder)
    _check_targets(origin, ("datasets", datasets), ("shared_folders", folders))
    _check_slugs(origin, read.environments)
    _check_way_in(origin, read.environments)
    return tuple(read.environments), datasets, folders


def _mount(name: str, written: Dataset, folder: str) -> Mount:
    return Mount(
        name=name,
        source=written.source,
        target=written.target or f"{folder}/{name}",
        read_only=not isinstance(written, SharedFolder) or written.mode == "ro",
        allowed_groups=written.allowed_groups,
    )


def _check_names(
    origin: Origin, index: int, environment: Environment, key: str, known: Mapping[str, Dataset]
) -> None:
    """Raise ConfigError if an environment names an undefined dataset or shared folder."""
    for place, name in enumerate(getattr(environment, key) or ()):
        if name not in known:
            raise origin.error(
                ("environments", index, key, place),
                f"environment {environment.slug!r} names a {NOUNS[key]} {name!r} that is not "
                f"defined under {key!r}. {suggest(name, known, 'Defined')}",
            )


def _check_files(origin: Origin, index: int, environment: Environment, folder: Path) -> None:
    for key in MOST_BYTES:
        name = getattr(environment, key)
        if not name or name.startswith("/"):  # a path on the hub's own host
            continue
        try:
            (find if key == "logo" else read_text)(folder, key, name)
        except ValueError as error:
            raise origin.error(
                ("environments", index, key),
                f"'{key}' of environment {environment.slug!r} {error}",
            ) from None


def _check_targets(origin: Origin, *named: tuple[str, tuple[Mount, ...]]) -> None:
    seen: list[Mount] = []
    for key, mounts in named:
        for mount in mounts:
            for other in seen:
                if is_inside(mount.target, other.target) or is_inside(other.target, mount.target):
                    raise origin.error(
                        (key, mount.name, "target"),
                        f"{mount.name!r} would be mounted on {mount.target} and {other.name!r} on "
                        f"{other.target}: one would hide the other. Change the 'target' of one.",
                    )
            seen.append(mount)


def _check_slugs(origin: Origin, environments: list[Environment]) -> None:
    """Raise ConfigError if two environments share a slug, or if two are the default."""
    seen: dict[str, int] = {}
    default = ""
    for index, environment in enumerate(environments):
        slug = environment.slug
        if slug in seen:
            raise origin.error(
                ("environments", index, "slug"),
                f"environments {seen[slug] + 1} and {index + 1} have the same slug {slug!r}. "
                "Change one of them.",
            )
        seen[slug] = index
        if environment.default and default:
            raise origin.error(
                ("environments", index, "default"),
                f"environments {default!r} and {slug!r} both say 'default: true'. Keep one of "
                "them.",
            )
        default = slug if environment.default else default


def _check_way_in(origin: Origin, environments: list[Environment]) -> None:
    """Raise ConfigError if members without credits could not start any environment."""
    for index, environment in enumerate(environments):
        if not environment.cpu_variant and not any(
            _opens_instead(other, environment) for other in environments
        ):
            raise origin.error(
                ("environments", index, "cpu_variant"),
                f"environment {environment.slug!r} says 'cpu_variant: false', and its members have "
                "no other that starts without a GPU: without credits they could not reach their "
                "files. Add one for them, or remove 'cpu_variant'.",
            )


def _opens_instead(other: Environment, environment: Environment) -> bool:
    """Return True if all who may use ``environment`` may start ``other`` without a device."""
    if not other.cpu_variant or other.allowed_groups is None:
        return other.cpu_variant
    wanted = environment.allowed_groups
    return wanted is not None and wanted <= other.allowed_groups
