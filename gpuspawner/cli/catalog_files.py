"""The files beside the catalog that say what is inside an image, and what is new in it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from pathlib import Path

from ..catalog import Environment
from .catalog_edit import replace_file

MOST_CHANGES = 100_000
"""Characters of a file of changes; older ones at its end go."""


def packages_file(folder: Path, slug: str, named: str, packages: Mapping[str, str]) -> str:
    """Write ``name==version`` lines; returns the file's name beside the catalog.

    ``named`` is the file that the entry has already, if any.
    """
    name = named or f"{slug}.packages.txt"
    lines = [f"{package}=={version}\n" for package, version in packages.items()]
    replace_file(folder / name, "".join(lines))
    return name


def changes_file(
    folder: Path,
    environment: Environment,
    before: Mapping[str, str],
    after: Mapping[str, str],
    day: date,
) -> str:
    """Put what is new since ``day`` on top of an environment's changes; returns the file's name."""
    name = environment.changes or f"{environment.slug}.changes.md"
    path = folder / name
    older = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = "\n".join(f"* {line}" for line in changes(before, after)) or "* The same packages."
    text = f"## {day.isoformat()}\n\n{lines}\n"
    replace_file(path, f"{text}\n{older}"[:MOST_CHANGES] if older else text)
    return name


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """What another image has, lacks, or has in another version."""
    told = []
    for name in sorted({*before, *after}, key=str.lower):
        old, new = before.get(name), after.get(name)
        if old is None:
            told.append(f"{name} {new} is new")
        elif new is None:
            told.append(f"{name} {old} is gone")
        elif old != new:
            told.append(f"{name} {old} → {new}")
    return told
