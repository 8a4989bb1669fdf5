"""Small edits of the admin's catalog: everything else in the file stays as it was written."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from ..catalog import Catalog, Environment, load
from ..errors import ConfigError

_SHARED = "other entries share what would be changed"


class CatalogFile:
    """A catalog on disk, whose text is right. Raises ConfigError when it is not."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()  # behind a link, the file itself is replaced
        self.catalog = load(self.path)
        self.text = self.path.read_text(encoding="utf-8")

    def set_keys(self, slug: str, values: Mapping[str, str]) -> None:
        """Give keys of an environment other values; a key that is not there is added.

        Raises ConfigError when the file says them in a way that only its author can change.
        """
        text = self.text
        try:
            for key, value in values.items():
                text = _with_key(text, slug, key, value, self.path)
        except yaml.YAMLError:  # what was replaced had a name (&x) that others use
            raise _by_hand(self.path, _SHARED) from None
        self._save(text, self.catalog.get(slug), lambda after: after.get(slug))

    def add(self, entry: Mapping[str, Any]) -> None:
        """Append an environment. Raises ConfigError."""
        text = _with_entry(self.text, entry, self.path)
        self._save(text, None, lambda after: after.get(str(entry["slug"])))

    def plain_entry(self, slug: str) -> dict[str, Any]:
        """The keys and values of an environment, as the file says them."""
        entries = yaml.safe_load(self.text)["environments"]
        return next(dict(entry) for entry in entries if entry.get("slug") == slug)

    def _save(
        self, text: str, before: Environment | None, find: Callable[[Catalog], Environment]
    ) -> None:
        """Put the text in place, if it is right and changes that environment only."""
        after = Catalog.from_text(text, str(self.path), self.path.parent)
        changed = find(after)
        others = tuple(e for e in after.environments if e is not changed)
        were = tuple(e for e in self.catalog.environments if e is not before)
        if others != were or replace(after, environments=()) != _without(self.catalog):
            raise _by_hand(self.path, _SHARED)
        replace_file(self.path, text)
        self.catalog, self.text = after, text


def entry_text(entry: Mapping[str, Any], indent: int = 0) -> str:
    """An entry as the lines of a catalog."""
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
        raise _by_hand(path, f"{key!r} of {slug!r} is no plain text")
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
    """Where the last value in a node ends, without the comments that follow."""
    if node.value and not getattr(node, "flow_style", True):
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return node.end_mark


def _by_hand(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} was not changed: {why}. Edit it by hand.")


def _without(catalog: Catalog) -> Catalog:
    return replace(catalog, environments=())


def replace_file(path: Path, text: str) -> None:
    """The new text under that name, with the mode and owner of what was there: all of it, or
    nothing. Raises ConfigError."""
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
