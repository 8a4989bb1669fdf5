"""What an environment's own page shows beside its card: limits, and files beside the catalog."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from ..catalog import Catalog, Environment, files
from ..catalog.markdown import to_html
from ..ledger.rules import format_time_left
from ..pool import format_memory
from .notebook import Notebook, read_notebook

T = TypeVar("T")

MOST_PACKAGES = 1000
"""Lines of the list of packages that are shown."""

_PACKAGE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?\s*==\s*([^\s;\\]+)")


@dataclass(frozen=True, slots=True)
class Details:
    """All of it as a template takes it; what is missing or cannot be read is empty."""

    description: str
    """Safe HTML."""
    packages: tuple[tuple[str, str], ...]
    """Names and versions."""
    packages_left_out: int
    changes: str
    """Safe HTML."""
    notebook: Notebook | None
    limits: tuple[tuple[str, str], ...]
    """What a server has and needs, in words."""
    data: tuple[str, ...]
    """Names of the datasets and folders that its servers have."""
    troubles: tuple[str, ...]
    """Files that cannot be read now, in sentences for an admin."""


def read_details(catalog: Catalog, environment: Environment, groups: Collection[str]) -> Details:
    """The details of an environment for a reader in these groups. Reads files."""
    troubles: list[str] = []

    def read(key: str, make: Callable[[str], T], otherwise: T) -> T:
        name = getattr(environment, key)
        if not name or catalog.folder is None:
            return otherwise
        try:
            return make(files.read_text(catalog.folder, key, name))
        except ValueError as error:
            troubles.append(f"'{key}' of the environment {environment.slug!r} {error}")
            return otherwise

    none: list[tuple[str, str]] = []
    packages = read("packages", read_packages, none)
    return Details(
        description=to_html(environment.description, 3),
        packages=tuple(packages[:MOST_PACKAGES]),
        packages_left_out=max(0, len(packages) - MOST_PACKAGES),
        changes=read("changes", lambda text: to_html(text, 3), ""),
        notebook=read("sample_notebook", read_notebook, None),
        limits=tuple(_limits(environment)),
        data=tuple(mount.name for mount in catalog.mounts_for(environment, groups)),
        troubles=tuple(troubles),
    )


def read_packages(text: str) -> list[tuple[str, str]]:
    """Names and versions in a list of packages, as ``pip freeze`` and lock files write it."""
    found = (_PACKAGE.match(line.strip()) for line in text.splitlines())
    return sorted({(m[1], m[2]) for m in found if m}, key=lambda p: (p[0].casefold(), p[1]))


def logo_file(catalog: Catalog, environment: Environment) -> tuple[bytes, str]:
    """The logo beside the catalog, and its media type. Raises ValueError when there is none."""
    if not environment.logo or environment.logo.startswith("/") or catalog.folder is None:
        raise ValueError("has no logo beside the catalog.")
    content = files.read(catalog.folder, "logo", environment.logo)
    return content, files.LOGO_TYPES[Path(environment.logo).suffix.lower()]


def _limits(environment: Environment) -> list[tuple[str, str]]:
    hours, memory = environment.hours.max, environment.min_memory
    lines = [
        ("GPUs", f"up to {environment.devices.max}" if environment.devices.max else "none"),
        ("GPU models", ", ".join(environment.models)),
        ("Memory of a GPU", f"at least {format_memory(memory)}" if memory else ""),
        ("NVIDIA driver", f"{environment.min_driver} or later" if environment.min_driver else ""),
        ("CUDA", f"{environment.min_cuda} or later" if environment.min_cuda else ""),
        ("Session", f"up to {format_time_left(timedelta(hours=hours))}" if hours else ""),
        ("Memory", format_memory(environment.mem_limit) if environment.mem_limit else ""),
        ("Processor cores", f"{environment.cpu_limit:g}" if environment.cpu_limit else ""),
        ("Shared memory", format_memory(environment.shm_size) if environment.shm_size else ""),
    ]
    return [(name, value) for name, value in lines if value]
