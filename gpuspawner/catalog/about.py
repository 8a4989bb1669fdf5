"""What an environment says of itself, for people: from plain values, of no effect on servers."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..reading.origin import shown
from ..reading.section import Section, mapping, text
from .files import find, named_file, read_text
from .kinds import MOST_NAMED, day, line, long_text, server_path, url
from .values import Framework, Link

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
