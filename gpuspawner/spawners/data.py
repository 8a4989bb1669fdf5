"""Which datasets and shared folders a member wants in a server: all of theirs, unless they say."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..catalog import Catalog, Environment
from ..errors import InvalidRequest

MOST = 200
LONGEST = 128


@dataclass(frozen=True, slots=True)
class DataChoice:
    """One line of the form's list of datasets and folders."""

    name: str
    where: str
    """The slugs of the environments that have it, with spaces between."""
    checked: bool


def parse_data(value: Any) -> tuple[str, ...] | None:
    """Names of datasets and folders; None when nothing is said. Raises InvalidRequest."""
    said = [value] if isinstance(value, str) else value
    if said is None:
        return None
    if not isinstance(said, (list, tuple)) or len(said) > MOST:
        raise InvalidRequest("The field 'data' must be a list of names.", field="data")
    for name in said:
        if not isinstance(name, str) or len(name) > LONGEST or not name.isprintable():
            shown = repr(str(name)[:60]) if isinstance(name, str) else "something else"
            raise InvalidRequest(f"The field 'data' must hold names, not {shown}.", field="data")
    return tuple(dict.fromkeys(name for name in said if name))  # a form says "" for none


def with_data(
    catalog: Catalog,
    environment: Environment,
    chosen: Sequence[str] | None,
    groups: Collection[str],
) -> Environment:
    """The environment with only these datasets and folders; with all when None.

    A form names those of other environments too: they are left out. Raises InvalidRequest for
    what the member has nowhere.
    """
    if chosen is None:
        return environment
    mounts = (*catalog.datasets, *catalog.shared_folders)
    known = {mount.name for mount in mounts if mount.visible_to(groups)}
    for name in chosen:
        if name not in known:
            there = f"There are: {', '.join(sorted(known))}." if known else "There are none."
            raise InvalidRequest(
                f"There is no dataset and no folder {name[:60]!r} for you. {there}", field="data"
            )
    here = {mount.name for mount in catalog.mounts_for(environment, groups)} & set(chosen)
    return replace(
        environment,
        datasets=tuple(m.name for m in catalog.datasets if m.name in here),
        shared_folders=tuple(m.name for m in catalog.shared_folders if m.name in here),
    )


def data_choices(
    catalog: Catalog,
    environments: Sequence[Environment],
    groups: Collection[str],
    last: Sequence[str] | None,
) -> list[DataChoice]:
    """What the form offers, in the catalog's order."""
    found: dict[str, list[str]] = {}
    for environment in environments:
        for mount in catalog.mounts_for(environment, groups):
            found.setdefault(mount.name, []).append(environment.slug)
    return [
        DataChoice(name, " ".join(slugs), last is None or name in last)
        for name, slugs in found.items()
    ]
