"""Files that an admin wrote, read strictly: YAML with line numbers, and checked values.

A key of the wrong type, and any key that nobody took, is a
:class:`~gpuspawner.core.errors.ConfigError` that names the file and the line.

The text becomes nodes without recursion, and the nodes values. Merge keys (``<<``) are taken
apart here and keep one value a key, and what stands behind aliases is counted as often as it is
used: neither can make much out of little.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from pathlib import Path as Folder
from typing import Any, TypeVar

import yaml

from .errors import ConfigError


def read_bytes(path: str | Path, most: int) -> bytes:
    """The first bytes of a file, or of what takes its place; waits for nobody. Raises OSError."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    with open(path, "rb", opener=opener) as file:
        return file.read(most) or b""


def read_text(path: str | Path, most: int, what: str) -> str:
    """The text of the admin's file, called ``what``, such as "catalog". Raises ConfigError for one
    that cannot be read, is no UTF-8, or has more than ``most`` bytes."""
    name = os.fspath(path)
    try:
        data = read_bytes(name, most + 1)
    except OSError as error:
        raise ConfigError(
            f"The {what} {name} cannot be read: {error.strerror}. Check the path and who may read "
            "it."
        ) from None
    if len(data) > most:
        raise ConfigError(f"{name} has more than {most} bytes: this is no {what}.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: this is not text in UTF-8. Save it as UTF-8.") from None


KeyPath = tuple[str | int, ...]
"""The keys and positions that lead to a value."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where values come from: a name for people, and the line of each value if known."""

    name: str
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    folder: Folder | None = None
    """Where files that the values name are; None when nobody can say."""

    def error(self, path: KeyPath, message: str) -> ConfigError:
        """A ConfigError about the value at ``path``, or about what encloses it."""
        while path and path not in self.lines:
            path = path[:-1]
        line = self.lines.get(path)
        where = f"{self.name}, line {line}" if line else self.name
        return ConfigError(f"{where}: {message}")


def shown(value: object) -> str:
    """A value as an error quotes it: short, and never a whole tree."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if value is None:
        return "nothing"
    try:
        quoted = str(value).lower() if isinstance(value, bool) else repr(value)
    except ValueError:  # Python writes no number of very many digits
        return "a number of very many digits"
    return quoted if len(quoted) <= 60 else f"{quoted[:57]}..."


T = TypeVar("T")

_SIZE = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
MOST_COMPARED = 500
"""Names that a misspelt word is held against; it is somebody who waits for the answer."""
MOST_NAMED = 30
"""Names in one sentence."""
_LEAST_SIZE = 1_000_000
_MOST_SIZE = 2**60
MOST_WHOLE = 1_000_000
MOST_NUMBER = 10**15
_MISSING: Any = object()


class Section:
    """A mapping that is read key by key; what nobody asked for is an unknown key."""

    def __init__(self, data: object, origin: Origin, path: KeyPath, label: str) -> None:
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
    if value > MOST_WHOLE:
        raise ValueError(f"is {shown(value)}; {MOST_WHOLE} is the most. Write less.")
    return value


def positive(value: object) -> float:
    """A number above zero."""
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0
    if not 0 < number < MOST_NUMBER:
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
    if count > _MOST_SIZE:
        raise ValueError(f"is {shown(value)}: more than any machine has. Write less.")
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


def suggest(word: str, known: Iterable[str], what: str = "Known") -> str:
    """``Did you mean 'image'?``, or else what there is; of very many only some."""
    names = list(known)
    word = word.lower()[:100]
    alike = names
    if len(names) > MOST_COMPARED:  # those that begin as it does
        alike = sorted(names, key=lambda name: -_alike(name, word))[:MOST_COMPARED]
    close = difflib.get_close_matches(word, alike, n=3, cutoff=0.6)
    if close:
        return f"Did you mean {' or '.join(repr(name) for name in close)}?"
    if not names:
        return "There is none."
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{what}: {', '.join(names[:MOST_NAMED])}{more}."


def _alike(one: str, other: str) -> int:
    """How many characters two words begin with alike."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


MOST_DEPTH = 40
MOST_REPEATED = 500_000
"""Values that aliases may add to what is written."""
TOO_DEEP = "this is nested too deeply. Write it flat."

_STR = "tag:yaml.org,2002:str"
_MERGE = "tag:yaml.org,2002:merge"
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(text: str, name: str, folder: Folder | None = None) -> tuple[Any, Origin]:
    """The values in ``text`` as plain Python values, and their origin.

    Raises ConfigError for what is no YAML, a key written twice, or a key that is no text.
    """
    try:
        nodes = _Nodes(name)
        root = nodes.read(text)
        reader = _Values(name, nodes.count + MOST_REPEATED)
        data = None if root is None else reader.value(root, ())
        return data, Origin(name, reader.lines, folder)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        problem = error.problem or error.context or "it cannot be read"
        if "nesting" in problem:  # from PyYAML 6.0.4 on its parser has a limit of its own
            raise ConfigError(f"{name}{line}: {TOO_DEEP}") from None
        raise ConfigError(
            f"{name}{line}: this is not valid YAML: {problem}. Check the indentation and quotes "
            "of this line and the one before it."
        ) from None
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"{name}: this is not valid YAML: {problem}.") from None


@dataclass(slots=True, eq=False)
class _Node:
    """A scalar's text, a sequence's nodes, or a mapping's keys and values in turn."""

    mark: Any
    tag: str | None
    plain: tuple[bool, bool]
    """As YAML asks for the meaning of a scalar without a tag."""
    text: str | None = None
    items: list[_Node] | None = None
    is_mapping: bool = False
    open: bool = False
    """While values are made of it: meeting it again then is a ring."""

    @property
    def line(self) -> int:
        return int(self.mark.line) + 1


class _Nodes:
    """The nodes of a text, from YAML's events."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.anchors: dict[str, _Node] = {}
        self.root: _Node | None = None

    def read(self, text: str) -> _Node | None:
        outer: list[_Node] = []
        documents = 0
        for event in yaml.parse(text, _Loader):
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _invalid(event, "a second document begins here; one is all that is read")
            elif isinstance(event, yaml.AliasEvent):
                if event.anchor not in self.anchors:
                    raise _invalid(event, f"the alias {event.anchor!r} stands for nothing above")
                self.put(self.anchors[event.anchor], outer)
            elif isinstance(event, yaml.NodeEvent):
                node = self.node(event)
                self.put(node, outer)
                if node.items is not None:
                    outer.append(node)
                    if len(outer) > MOST_DEPTH:
                        raise _error(self.name, node, TOO_DEEP)
            elif isinstance(event, yaml.CollectionEndEvent):
                outer.pop()
        return self.root

    def node(self, event: Any) -> _Node:
        self.count += 1
        if isinstance(event, yaml.ScalarEvent):
            node = _Node(event.start_mark, event.tag, event.implicit, text=event.value)
        else:
            is_mapping = isinstance(event, yaml.MappingStartEvent)
            node = _Node(event.start_mark, None, (False, False), items=[], is_mapping=is_mapping)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def put(self, node: _Node, outer: list[_Node]) -> None:
        if outer and (items := outer[-1].items) is not None:
            items.append(node)
        else:
            self.root = node


class _Values:
    """One pass over nodes."""

    def __init__(self, name: str, most: int) -> None:
        self.name = name
        self.left = most
        self.lines: dict[KeyPath, int] = {}
        self.meaning = yaml.SafeLoader("")
        self.pairs: dict[_Node, dict[str, tuple[_Node, _Node]]] = {}
        self.tags: dict[str, str] = {}
        """What plain scalars mean, by their text."""

    def value(self, node: _Node, path: KeyPath) -> Any:
        self.count(1, node)
        if node.items is None:
            return self.scalar(node)
        self.enter(node)
        try:
            if node.is_mapping:
                return dict(self.members(node, path))
            return [self.value(child, spot) for child, spot in self.elements(node, path)]
        finally:
            node.open = False

    def count(self, values: int, node: _Node) -> None:
        self.left -= values
        if self.left < 0:
            raise _error(self.name, node, "aliases repeat too much of what is written. Write less.")

    def members(self, node: _Node, path: KeyPath) -> Iterator[tuple[str, Any]]:
        for key, (key_node, child) in self.resolved(node).items():
            if self.tag(key_node) != _STR:
                word = key_node.text[:60] if key_node.text is not None else "here"
                raise _error(self.name, key_node, f"the key {word} is no text. Put it in quotes.")
            spot: KeyPath = (*path, key)
            self.lines[spot] = key_node.line
            yield key, self.value(child, spot)

    def elements(self, node: _Node, path: KeyPath) -> Iterator[tuple[_Node, KeyPath]]:
        for index, child in enumerate(node.items or ()):
            spot: KeyPath = (*path, index)
            self.lines[spot] = child.line
            yield child, spot

    def resolved(self, node: _Node) -> dict[str, tuple[_Node, _Node]]:
        """Key and value by key: those that are merged in first, then the mapping's own."""
        if (known := self.pairs.get(node)) is not None:
            return known
        own: dict[str, tuple[_Node, _Node]] = {}
        merged: list[_Node] = []
        items = iter(node.items or ())
        for key_node, child in zip(items, items, strict=True):
            key = key_node.text if key_node.text is not None else f"<{key_node.line}>"
            if key in own:
                raise _error(
                    self.name,
                    key_node,
                    f"the key {shown(key)} was already written on line {own[key][0].line}. Keep "
                    "one of them.",
                )
            own[key] = (key_node, child)
            if self.tag(key_node) == _MERGE:
                merged.append(child)
        if merged:
            del own["<<"]
        found: dict[str, tuple[_Node, _Node]] = {}
        for child in merged:
            sources = [child] if child.is_mapping or child.items is None else child.items
            for source in reversed(sources):  # of several the first goes before the others
                more = self.merge_of(source)
                self.count(len(more), node)
                found.update(more)
        self.pairs[node] = found | own
        return self.pairs[node]

    def merge_of(self, source: _Node) -> dict[str, tuple[_Node, _Node]]:
        if not source.is_mapping:
            raise _error(self.name, source, "only mappings can be merged with '<<'. Name one.")
        if source in self.pairs:
            return self.pairs[source]
        self.enter(source)
        try:
            return self.resolved(source)
        finally:
            source.open = False

    def enter(self, node: _Node) -> None:
        if node.open:
            raise _error(self.name, node, "this value refers to itself. Write it out.")
        node.open = True

    def tag(self, node: _Node) -> str:
        """What a node means, as YAML's own rules have it."""
        if node.text is None:
            return ""
        if node.tag and node.tag != "!":
            return node.tag
        if node.tag == "!" or not node.plain[0]:
            return _STR
        if node.text not in self.tags:
            tag = self.meaning.resolve(yaml.ScalarNode, node.text, (True, False))
            self.tags[node.text] = str(tag)
        return self.tags[node.text]

    def scalar(self, node: _Node) -> Any:
        tag = self.tag(node)
        if tag == _STR:
            return node.text
        try:
            return self.meaning.construct_object(yaml.ScalarNode(tag, node.text, node.mark))
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
            raise _error(
                self.name,
                node,
                f"{shown(node.text)} cannot be read as it stands. Put it in quotes.",
            ) from None


def _invalid(event: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def _error(name: str, node: _Node, message: str) -> ConfigError:
    return ConfigError(f"{name}, line {node.line}: {message}")
