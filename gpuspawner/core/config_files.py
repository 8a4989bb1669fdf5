"""Files that an admin wrote, read strictly: YAML with line numbers.

Neither nesting, aliases nor merge keys (``<<``) can exhaust the stack or expand a small file into a
huge one. What the values have to be is said by :mod:`~gpuspawner.core.config_models`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError


def read_bytes(path: str | Path, most: int) -> bytes:
    """Return the first bytes of a file, or of a device or pipe, without waiting. Raises OSError."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    with open(path, "rb", opener=opener) as file:
        return file.read(most) or b""


def read_text(path: str | Path, most: int, what: str) -> str:
    """Return an admin's file, called ``what``, such as "catalog", as text. Raises ConfigError."""
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
    folder: Path | None = None
    """The directory of files that the values name; None if unknown."""

    def error(self, path: KeyPath, message: str) -> ConfigError:
        """Return a ConfigError about the value at ``path``, or about what encloses it."""
        while path and path not in self.lines:
            path = path[:-1]
        line = self.lines.get(path)
        where = f"{self.name}, line {line}" if line else self.name
        return ConfigError(f"{where}: {message}")


def shown(value: object) -> str:
    """Format a value for an error: short, and never a whole tree."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if value is None:
        return "nothing"
    try:
        quoted = str(value).lower() if isinstance(value, bool) else repr(value)
    except ValueError:  # Python does not format numbers with very many digits
        return "a number of very many digits"
    return quoted if len(quoted) <= 60 else f"{quoted[:57]}..."


MOST_COMPARED = 500
"""How many names are compared with a misspelt word, while a user waits."""
MOST_NAMED = 30
"""Names in one sentence."""


def suggest(word: str, known: Iterable[str], what: str = "Known") -> str:
    """Suggest ``Did you mean 'image'?``, or else list what there is; of very many only some."""
    names = list(known)
    word = word.lower()[:100]
    alike = names
    if len(names) > MOST_COMPARED:  # those with the same beginning
        alike = sorted(names, key=lambda name: -_alike(name, word))[:MOST_COMPARED]
    close = difflib.get_close_matches(word, alike, n=3, cutoff=0.6)
    if close:
        return f"Did you mean {' or '.join(repr(name) for name in close)}?"
    if not names:
        return "There is none."
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{what}: {', '.join(names[:MOST_NAMED])}{more}."


def _alike(one: str, other: str) -> int:
    """Return the length of the common beginning of two words."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


MOST_DEPTH = 40
MOST_REPEATED = 500_000
"""How many values aliases may add to what is written."""
TOO_DEEP = "this is nested too deeply. Write it flat."

_STR = "tag:yaml.org,2002:str"
_MERGE = "tag:yaml.org,2002:merge"
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(text: str, name: str, folder: Path | None = None) -> tuple[Any, Origin]:
    """Return the text's values as plain Python values, and their origin. Raises ConfigError."""
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
    """What YAML needs to resolve a scalar without a tag."""
    text: str | None = None
    items: list[_Node] | None = None
    is_mapping: bool = False
    open: bool = False
    """True while its value is built: meeting it again then is a cycle."""

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
        """Return the root node of the text, or None if it is empty."""
        outer: list[_Node] = []
        documents = 0
        for event in yaml.parse(text, _Loader):  # without recursion
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _invalid(event, "a second document begins here; one is all that is read")
            elif isinstance(event, yaml.AliasEvent):
                if event.anchor not in self.anchors:
                    raise _invalid(event, f"the alias {event.anchor!r} is not defined above")
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
        """The tags of plain scalars, by their text."""

    def value(self, node: _Node, path: KeyPath) -> Any:
        self.count(1, node)
        if node.items is None:
            return self.scalar(node)
        self.enter(node)
        try:
            if node.is_mapping:
                return dict(self.members(node, path))
            return list(self.elements(node, path))
        finally:
            node.open = False

    def count(self, values: int, node: _Node) -> None:
        """Count values. Raises ConfigError if aliases repeat too much."""
        self.left -= values
        if self.left < 0:
            raise _error(self.name, node, "aliases expand to too much text. Use fewer aliases.")

    def members(self, node: _Node, path: KeyPath) -> Iterator[tuple[str, Any]]:
        """Yield the key and value of each pair of a mapping."""
        for key, (key_node, child) in self.resolved(node).items():
            if self.tag(key_node) != _STR:
                word = key_node.text[:60] if key_node.text is not None else "here"
                raise _error(self.name, key_node, f"the key {word} is not text. Put it in quotes.")
            spot: KeyPath = (*path, key)
            self.lines[spot] = key_node.line
            yield key, self.value(child, spot)

    def elements(self, node: _Node, path: KeyPath) -> Iterator[Any]:
        """Yield each value of a sequence."""
        for index, child in enumerate(node.items or ()):
            spot: KeyPath = (*path, index)
            self.lines[spot] = child.line
            yield self.value(child, spot)

    def resolved(self, node: _Node) -> dict[str, tuple[_Node, _Node]]:
        """Return key and value nodes by key: merged ones first, then the mapping's own."""
        if (known := self.pairs.get(node)) is not None:
            return known
        own: dict[str, tuple[_Node, _Node]] = {}
        merged: list[_Node] = []
        items = iter(node.items or ())
        for key_node, child in zip(items, items, strict=True):
            key = key_node.text if key_node.text is not None else f"<{key_node.line}>"
            if key in own:
                said = f"the key {shown(key)} was already written on line {own[key][0].line}. Keep "
                raise _error(self.name, key_node, said + "one of them.")
            own[key] = (key_node, child)
            if self.tag(key_node) == _MERGE:
                merged.append(child)
        if merged:
            del own["<<"]
        found: dict[str, tuple[_Node, _Node]] = {}
        for child in merged:
            sources = [child] if child.is_mapping or child.items is None else child.items
            for source in reversed(sources):  # the first of several goes before the others
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
        """Mark a node as being built. Raises ConfigError for a cycle."""
        if node.open:
            raise _error(self.name, node, "this value refers to itself. Write it out.")
        node.open = True

    def tag(self, node: _Node) -> str:
        """Return the tag of a node by YAML's own rules."""
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
            said = f"{shown(node.text)} cannot be read as it stands. Put it in quotes."
            raise _error(self.name, node, said) from None


def _invalid(event: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def _error(name: str, node: _Node, message: str) -> ConfigError:
    return ConfigError(f"{name}, line {node.line}: {message}")
