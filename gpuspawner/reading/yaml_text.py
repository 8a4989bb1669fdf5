"""YAML as plain values, with the line of each: strict, and in bounded time and memory.

The text becomes nodes without recursion, and the nodes values. Merge keys (``<<``) are taken
apart here and keep one value a key, and what stands behind aliases is counted as often as it is
used: neither can make much out of little.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path as Folder
from typing import Any

import yaml

from ..errors import ConfigError
from .origin import Origin, Path, shown

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
        self.lines: dict[Path, int] = {}
        self.meaning = yaml.SafeLoader("")
        self.pairs: dict[_Node, dict[str, tuple[_Node, _Node]]] = {}
        self.tags: dict[str, str] = {}
        """What plain scalars mean, by their text."""

    def value(self, node: _Node, path: Path) -> Any:
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

    def members(self, node: _Node, path: Path) -> Iterator[tuple[str, Any]]:
        for key, (key_node, child) in self.resolved(node).items():
            if self.tag(key_node) != _STR:
                word = key_node.text[:60] if key_node.text is not None else "here"
                raise _error(self.name, key_node, f"the key {word} is no text. Put it in quotes.")
            spot: Path = (*path, key)
            self.lines[spot] = key_node.line
            yield key, self.value(child, spot)

    def elements(self, node: _Node, path: Path) -> Iterator[tuple[_Node, Path]]:
        for index, child in enumerate(node.items or ()):
            spot: Path = (*path, index)
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
