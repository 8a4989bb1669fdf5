"""Create catalog entries from images, and edit the catalog file without other changes to it."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Set
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from ..core.errors import ConfigError
from ..engines.images import ENTRY, split_image
from .loader import Catalog, load
from .models import Environment
from .value_kinds import LONGEST_SLUG

OCI = "org.opencontainers.image."
_PLAIN = (
    "first_page",
    "shm_size",
    "min_driver",
    "min_cuda",
    "min_memory",
    "mem_limit",
    "mem_guarantee",
)
"""Labels whose values are copied to keys of the same name."""


def entry_of(
    image: str, labels: Mapping[str, str], packages: Mapping[str, str], slug: str | None = None
) -> dict[str, Any]:
    """Return the catalog entry of an image, from its labels and packages.

    ``slug`` takes precedence over the label. Without labels, slug and display name come from the
    image's name. Raises ConfigError for an invalid label.
    """

    def own(name: str) -> str:
        return labels.get(ENTRY + name, "").strip()

    def standard(name: str) -> str:
        return " ".join(labels.get(OCI + name, "").split())

    plain = slug or own("slug") or _slug(image)
    entry: dict[str, Any] = {"slug": plain}
    entry["display_name"] = standard("title") or plain
    if summary := standard("description"):
        entry["summary"] = summary[:200]
    entry["image"] = image
    frameworks = {
        name: packages[found]
        for name in own("packages").split()
        for found in packages
        if _same(found, name)
    }
    if frameworks:
        entry["frameworks"] = frameworks
    if devices := own("devices"):
        entry |= _devices(image, devices)
    entry |= {key: own(key) for key in _PLAIN if own(key)}
    links = {
        title: standard(key)
        for title, key in (("Documentation", "documentation"), ("Source", "source"))
        if standard(key).startswith(("https://", "http://"))
    }
    if links:
        entry["links"] = links
    if maintainer := standard("authors") or standard("vendor"):
        entry["maintainer"] = maintainer[:200]
    return entry


def _devices(image: str, text: str) -> dict[str, Any]:
    """Parse a label such as ``1-4`` (default 1, maximum 4). ``0-0`` means no devices."""
    found = re.fullmatch(r"(\d{1,3})-(\d{1,3})", text)
    if not found or int(found[1]) > int(found[2]):
        raise ConfigError(
            f"The label {ENTRY}devices of {image} is {text!r}. Write it as '1-4': how many GPUs a "
            "member gets by default, and how many at most."
        )
    return {"devices": {"default": int(found[1]), "max": int(found[2])}}


def _slug(image: str) -> str:
    """Return the last part of the image's name as a slug."""
    name = split_image(image)[0].rpartition("/")[2].lower()
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")[:LONGEST_SLUG].strip("-") or "image"


def _same(one: str, other: str) -> bool:
    return re.sub(r"[-_.]+", "-", one).lower() == re.sub(r"[-_.]+", "-", other).lower()


_SHARED = "other entries share what would be changed"


class CatalogFile:
    """A valid catalog file that can be edited. Raises ConfigError if it is not valid."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()  # replace the file and not a link to it
        self.catalog = load(self.path)
        self.text = self.path.read_text(encoding="utf-8")

    def set_keys(
        self, slug: str, values: Mapping[str, str], *, beside: Mapping[str, Any] | None = None
    ) -> None:
        """Set keys of an environment, and add the missing ones.

        ``beside`` is a new environment that is appended in the same write. Raises ConfigError if
        the file's notation does not allow an automatic change.
        """
        text = self.text
        try:
            for key, value in values.items():
                text = _with_key(text, slug, key, value, self.path)
        except yaml.YAMLError:  # the old value had an anchor (&x) that other entries use
            raise _by_hand(self.path, _SHARED) from None
        changed = {slug}
        if beside is not None:
            text = _with_entry(text, beside, self.path)
            changed.add(str(beside["slug"]))
        self._save(text, changed)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Append an environment. Raises ConfigError."""
        self._save(_with_entry(self.text, entry, self.path), {str(entry["slug"])})

    def plain_entry(self, slug: str) -> dict[str, Any]:
        """Return the keys and values of an environment as they are in the file."""
        entries = yaml.safe_load(self.text)["environments"]
        return next(dict(entry) for entry in entries if entry.get("slug") == slug)

    def _save(self, text: str, changed: Set[str]) -> None:
        """Replace the file if the text is valid and changes these environments only."""
        after = Catalog.from_text(text, str(self.path), self.path.parent)
        others, were = (
            replace(some, environments=tuple(e for e in some.environments if e.slug not in changed))
            for some in (after, self.catalog)
        )
        if others != were or not changed <= {e.slug for e in after.environments}:
            raise _by_hand(self.path, _SHARED)
        replace_file(self.path, text)
        self.catalog, self.text = after, text


def entry_text(entry: Mapping[str, Any], indent: int = 0) -> str:
    """Format an entry as lines of a catalog file."""
    lines = yaml.safe_dump(
        [dict(entry)], sort_keys=False, allow_unicode=True, default_flow_style=None, width=90
    )
    return "".join(f"{' ' * indent}{line}\n" for line in lines.splitlines())


def _with_key(text: str, slug: str, key: str, value: str, path: Path) -> str:
    item = _item(text, slug, path)
    keys = {k.value: (k, v) for k, v in item.value if isinstance(k, yaml.ScalarNode)}
    if key not in keys:
        if item.flow_style or "slug" not in keys:
            raise _by_hand(path, f"the entry {slug!r} is written in braces")
        name, last = keys["slug"]
        end = text.find("\n", last.end_mark.index)
        end = len(text) if end < 0 else end
        line = f"\n{' ' * name.start_mark.column}{key}: {value}"
        return text[:end] + line + text[end:]
    old = keys[key][1]
    if not isinstance(old, yaml.ScalarNode) or old.style in ("|", ">"):
        raise _by_hand(path, f"{key!r} of {slug!r} is not plain text")
    start, end = old.start_mark.index, old.end_mark.index
    if old.style in ("'", '"'):
        start, end = start + 1, end - 1
    return text[:start] + value + text[end:]


def _with_entry(text: str, entry: Mapping[str, Any], path: Path) -> str:
    sequence = _environments(text, path)
    if sequence.flow_style:
        raise _by_hand(path, "its environments are written in brackets")
    at = _end(sequence.value[-1]).index
    if text[at - 1 : at] != "\n":
        line_end = text.find("\n", at)
        text, at = (text + "\n", len(text) + 1) if line_end < 0 else (text, line_end + 1)
    return f"{text[:at]}\n{entry_text(entry, sequence.start_mark.column)}{text[at:]}"


def _environments(text: str, path: Path) -> yaml.SequenceNode:
    top = yaml.compose(text, yaml.SafeLoader)
    for key, value in top.value if top else ():
        if key.value == "environments" and isinstance(value, yaml.SequenceNode):
            return value
    raise _by_hand(path, "its environments are written elsewhere")


def _item(text: str, slug: str, path: Path) -> yaml.MappingNode:
    for item in _environments(text, path).value:
        for key, value in item.value:
            if key.value == "slug" and value.value == slug:
                found: yaml.MappingNode = item
                return found
    raise _by_hand(path, f"the entry {slug!r} takes its slug from elsewhere")


def _end(node: yaml.Node) -> Any:
    """Return the end mark of the last value in a node, before any comments that follow."""
    if node.value and not getattr(node, "flow_style", True):
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return node.end_mark


def _by_hand(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} was not changed: {why}. Edit it by hand.")


def replace_file(path: Path, text: str) -> None:
    """Replace a file's text atomically, keeping its mode and owner. Raises ConfigError."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            if path.exists():
                shutil.copymode(path, file.name)
                there = path.stat()
                if (there.st_uid, there.st_gid) != (os.geteuid(), os.getegid()):
                    os.chown(file.name, there.st_uid, there.st_gid)
            else:
                os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None


MOST_CHANGES = 100_000
"""Maximum number of characters of a changes file. Its oldest end is cut off."""


def packages_file(folder: Path, slug: str, named: str, packages: Mapping[str, str]) -> str:
    """Write ``name==version`` lines, and return the file's name beside the catalog.

    ``named`` is the file that the entry already names, or empty.
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
    """Add a section dated ``day`` on top of the changes file, and return the file's name."""
    name = environment.changes or f"{environment.slug}.changes.md"
    path = folder / name
    older = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = "\n".join(f"* {line}" for line in changes(before, after)) or "* The same packages."
    text = f"## {day.isoformat()}\n\n{lines}\n"
    replace_file(path, f"{text}\n{older}"[:MOST_CHANGES] if older else text)
    return name


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return a line for each package that was added, removed or has another version."""
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
