"""Reading a configuration file strictly, with errors that name the file and the line.

:func:`read_yaml` turns text into plain values and remembers each one's line;
:class:`Section` then takes a mapping apart key by key: a key of the wrong type, and any
key that nobody took, is a :class:`~gpuspawner.errors.ConfigError`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path as Folder
from typing import Any, TypeVar

import yaml

from ..errors import ConfigError

T = TypeVar("T")
Path = tuple[str | int, ...]

_SIZE = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_LEAST_SIZE = 1_000_000
_MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class Origin:
    """Where values come from: a name for people, and the line of each value if known."""

    name: str
    lines: Mapping[Path, int] = field(default_factory=dict)
    folder: Folder | None = None
    """Where files that the values name are; None when nobody can say."""

    def error(self, path: Path, message: str) -> ConfigError:
        """A ConfigError about the value at ``path``, or about what encloses it."""
        while path and path not in self.lines:
            path = path[:-1]
        line = self.lines.get(path)
        where = f"{self.name}, line {line}" if line else self.name
        return ConfigError(f"{where}: {message}")


def read_yaml(text: str, name: str, folder: Folder | None = None) -> tuple[Any, Origin]:
    """The values in ``text`` as plain Python values, and their origin.

    Raises ConfigError for what is no YAML, a key written twice, or a key that is no text.
    """
    reader = _YamlReader(text, name)
    try:
        data, lines = reader.read()
        return data, Origin(name, lines, folder)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        problem = error.problem or error.context or "it cannot be read"
        raise ConfigError(
            f"{name}{line}: this is not valid YAML: {problem}. Check the indentation and quotes "
            "of this line and the one before it."
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: this is not valid YAML: {error}.") from None
    except RecursionError:
        raise ConfigError(f"{name}: its values are nested too deeply. Write them flat.") from None


class _YamlReader:
    """One pass over the nodes of a YAML text."""

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        self.lines: dict[Path, int] = {}
        self.merged: set[int] = set()
        self.enclosing: list[yaml.Node] = []

    def read(self) -> tuple[Any, Mapping[Path, int]]:
        # Made here, because a character that YAML forbids raises in the constructor.
        self.loader = yaml.SafeLoader(self.text)
        try:
            node = self.loader.get_single_node()
            data = None if node is None else self.value(node, ())
        finally:
            self.loader.dispose()
        return data, self.lines

    def value(self, node: yaml.Node, path: Path) -> Any:
        if any(node is outer for outer in self.enclosing):
            raise self.error(node, "this value refers to itself. Write it out.")
        self.enclosing.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return {
                    key: self.value(child, (*path, key)) for key, child in self.items(node, path)
                }
            if isinstance(node, yaml.SequenceNode):
                return [self.value(child, (*path, i)) for i, child in self.elements(node, path)]
            return self.scalar(node)
        finally:
            self.enclosing.pop()

    def items(self, node: yaml.MappingNode, path: Path) -> Iterator[tuple[str, yaml.Node]]:
        """Keys and value nodes; merge keys (``<<``) are resolved, own keys come last."""
        if id(node) not in self.merged:  # a node behind an alias is met more than once
            self.merged.add(id(node))
            self.check_keys(node)
            self.loader.flatten_mapping(node)
        for key_node, child in node.value:
            key = key_node.value
            if key_node.tag != "tag:yaml.org,2002:str":
                word = key if isinstance(key, str) else "here"
                raise self.error(key_node, f"the key {word} is no text. Put it in quotes.")
            spot: Path = (*path, key)
            self.lines[spot] = key_node.start_mark.line + 1
            yield key, child

    def elements(self, node: yaml.SequenceNode, path: Path) -> Iterator[tuple[int, yaml.Node]]:
        for index, child in enumerate(node.value):
            spot: Path = (*path, index)
            self.lines[spot] = child.start_mark.line + 1
            yield index, child

    def check_keys(self, node: yaml.MappingNode) -> None:
        """Before merge keys are resolved: no key is written twice."""
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in seen:
                raise self.error(
                    key_node,
                    f"the key {key!r} was already written on line {seen[key]}. Keep one of them.",
                )
            seen[key] = line

    def scalar(self, node: yaml.Node) -> Any:
        try:
            return self.loader.construct_object(node)
        except (ValueError, KeyError, AttributeError):  # such as the date 2025-13-01
            raise self.error(
                node, f"{shown(node.value)} cannot be read as it stands. Put it in quotes."
            ) from None

    def error(self, node: yaml.Node, message: str) -> ConfigError:
        return ConfigError(f"{self.name}, line {node.start_mark.line + 1}: {message}")


class Section:
    """A mapping that is read key by key; what nobody asked for is an unknown key."""

    def __init__(self, data: object, origin: Origin, path: Path, label: str) -> None:
        self.origin = origin
        self.path = path
        self.label = label
        """What people call this section, such as ``environment 'base'``."""
        if not isinstance(data, Mapping):
            raise origin.error(
                path, f"{label} is {shown(data)}, not a mapping. Write it as 'key: value' lines."
            )
        self.data = data
        self.known: list[str] = []

    def error(self, key: str, message: str) -> ConfigError:
        """A ConfigError about ``key``, or about the section itself when it has no such key."""
        return self.origin.error((*self.path, key), message)

    def take(self, key: str, kind: Callable[[object], T], default: T = _MISSING) -> T:
        """The value of ``key`` as ``kind`` makes it; ``default`` when the key is absent.

        ``kind`` raises ValueError with the end of a sentence that begins with the key.
        """
        self.known.append(key)
        if key not in self.data:
            if default is _MISSING:
                raise self.missing(key)
            return default
        value = self.data[key]
        if value is None:
            raise self.error(
                key, f"'{key}' of {self.label} has no value. Write one, or leave the key out."
            )
        try:
            return kind(value)
        except ValueError as error:
            raise self.error(key, f"'{key}' of {self.label} {error}") from None

    def missing(self, key: str) -> ConfigError:
        """A ConfigError for a required key, which may be there under a misspelt name."""
        strings = [other for other in self.data if isinstance(other, str)]
        for slip in difflib.get_close_matches(key, strings, n=1, cutoff=0.75):
            return self.error(slip, f"{self.label} has no '{key}'. Did you misspell it {slip!r}?")
        return self.error(key, f"{self.label} has no '{key}'. Add it.")

    def sections(self, key: str, label: str) -> Iterator[tuple[str, Section]]:
        """The named sections of an optional mapping of mappings."""
        empty: dict[str, Any] = {}
        names = self.take(key, mapping, empty)
        for name, data in names.items():
            yield name, Section(data, self.origin, (*self.path, key, name), f"{label} {name!r}")

    def done(self) -> None:
        """Raises ConfigError for the first key that nobody took."""
        for key in self.data:
            if key not in self.known:
                raise self.error(
                    str(key),
                    f"{self.label} has an unknown key {key!r}. {suggest(str(key), self.known)}",
                )


# Kinds of values, for Section.take.


def text(value: object) -> str:
    """Text that is not empty, without the white space around it."""
    if not isinstance(value, str):
        raise ValueError(f"is {shown(value)}, not text. Put it in quotes.")
    if not value.strip():
        raise ValueError("is empty. Write something, or leave the key out.")
    return value.strip()


def whole(value: object) -> int:
    """A whole number of at least zero."""
    if type(value) is not int or value < 0:
        raise ValueError(f"is {shown(value)}, not a whole number. Write one such as 1.")
    return value


def positive(value: object) -> float:
    """A number above zero."""
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0
    if not 0 < number < float("inf"):
        raise ValueError(f"is {shown(value)}, not a number above zero. Write one such as 2.5.")
    return float(number)


def truth(value: object) -> bool:
    """``true`` or ``false``."""
    if not isinstance(value, bool):
        raise ValueError(f"is {shown(value)}. Write true or false.")
    return value


def size(value: object) -> int:
    """Bytes, or text with a unit in powers of 1024 as in JupyterHub: ``8G``."""
    return _size(value, 1024)


def device_memory(value: object) -> int:
    """Bytes, or text with a unit as makers of GPUs count (``24G``: 24 x 1000^3).

    A 24 GB card reports a little less than 24 x 1024^3 bytes, and ``24G`` has to mean it.
    ``Gi`` counts in powers of 1024.
    """
    return _size(value, 1000)


def _size(value: object, base: int) -> int:
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    count = value if type(value) is int else 0
    if match and not (match[3] and not match[2]):
        factor = (1024 if match[3] else base) ** _POWERS[match[2].upper()]
        count = int(float(match[1]) * factor)
    if count <= 0:
        raise ValueError(f"is {shown(value)}, not a size. Write one such as 8G or 512M.")
    if count < _LEAST_SIZE:
        raise ValueError(f"is {shown(value)}: less than 1M. Write a unit, such as 8G or 512M.")
    return count


def mapping(value: object) -> dict[str, Any]:
    """A mapping whose keys are text."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"is {shown(value)}, not a mapping. Write it as 'key: value' lines.")
    return dict(value)


def texts(value: object) -> tuple[str, ...]:
    """A list of different, non-empty texts."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"is {shown(value)}, not a list. Write it as [one, another].")
    found: list[str] = []
    for item in value:
        if not isinstance(item, str) or not item.strip():
            raise ValueError(f"holds {shown(item)}, which is no text. Put it in quotes.")
        if item.strip() in found:
            raise ValueError(f"names {item.strip()!r} twice. Keep one of them.")
        found.append(item.strip())
    return tuple(found)


# Words for people.


def shown(value: object) -> str:
    """A value as an error quotes it: short, and never a whole tree."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if value is None:
        return "nothing"
    quoted = str(value).lower() if isinstance(value, bool) else repr(value)
    return quoted if len(quoted) <= 60 else f"{quoted[:57]}..."


def suggest(word: str, known: Iterable[str], what: str = "Known") -> str:
    """``Did you mean 'image'?``, or else all that there is."""
    names = list(known)
    close = difflib.get_close_matches(word.lower(), names, n=3, cutoff=0.6)
    if close:
        return f"Did you mean {' or '.join(repr(name) for name in close)}?"
    return f"{what}: {', '.join(names)}." if names else "There is none."
