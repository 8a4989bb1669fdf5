"""Settings: each Configurable with its traits, from the classes themselves."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from functools import cache
from math import inf, isfinite
from typing import Any

from docutils import nodes
from traitlets import DefaultHandler, TraitType, Undefined
from traitlets.config import Configurable

import gpuspawner

from .page import Generated, literal, plain, refer, rst, table

PARTS = ("Directory", "ImagePrefetcher", "Rules", "Sentences", "Services")
"""Internal classes: a configuration names the classes that are made of them."""


@cache
def configurables() -> dict[str, type[Configurable]]:
    """Return every class of ours that a configuration may name."""
    for module in pkgutil.walk_packages(gpuspawner.__path__, "gpuspawner."):
        last = module.name.rpartition(".")[2]
        if last in ("__main__", "env") or ".versions" in module.name or last.endswith("_config"):
            continue  # these run when they are imported
        importlib.import_module(module.name)
    ours = {cls for cls in _below(Configurable) if _is_ours(cls) and cls.__name__ not in PARTS}
    return {cls.__name__: cls for cls in sorted(ours, key=lambda cls: cls.__name__)}


@cache
def documented() -> dict[str, type[Configurable]]:
    """Return those of them with settings of their own."""
    return {name: cls for name, cls in configurables().items() if settings_of(cls)}


def _below(cls: type) -> Iterator[type]:
    for each in cls.__subclasses__():
        yield each
        yield from _below(each)


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "gpuspawner"


def settings_of(cls: type[Configurable]) -> dict[str, TraitType[Any, Any]]:
    """Return the settings that no parent among these classes has."""
    among = set(configurables().values())
    parents = [each for each in cls.__mro__[1:] if each in among]
    return {
        name: trait
        for name, trait in sorted(cls.class_traits(config=True).items())
        if _is_ours(trait.this_class)
        and not any(issubclass(each, trait.this_class) for each in parents)
    }


def names() -> Iterator[str]:
    """Yield every setting with its class: ``GPUQueue.policy``."""
    for name, cls in documented().items():
        yield from (f"{name}.{setting}" for setting in settings_of(cls))


def type_of(trait: Any) -> str:
    """Return the type of a setting: ``dict[str, float]``, ``int, at least 0``."""
    words = {
        "Unicode": "str", "UnicodeWithDefault": "str", "Bool": "bool", "Float": "float",
        "Integer": "int", "Int": "int", "Dict": "dict", "List": "list", "Set": "set",
        "Tuple": "tuple", "Callable": "callable", "ByteSpecification": "size, such as 8G",
        "Any": "any",
    }  # fmt: skip
    name = type(trait).__name__
    if name == "Union":
        return " or ".join(map(type_of, trait.trait_types))
    if values := getattr(trait, "values", None):
        return "one of " + ", ".join(repr(value) for value in values)
    inner = [x for n in ("_key_trait", "_value_trait", "_trait") if (x := getattr(trait, n, None))]
    inner = [each for each in inner if type(each).__name__ != "Any"]
    text = words.get(name, name)
    if inner:
        text += f"[{', '.join(map(type_of, inner))}]"
    if isfinite(least := _limit(trait, "min")):
        text += f", at least {least:g}"
    if isfinite(most := _limit(trait, "max")):
        text += f", at most {most:g}"
    return text + (" or None" if trait.allow_none and name != "Any" else "")


def _limit(trait: Any, name: str) -> float:
    value = getattr(trait, name, None)
    return inf if value is None else float(value)


def default_of(cls: type[Configurable], name: str, trait: Any) -> str:
    """Return a setting's default as Python writes it."""
    for each in cls.__mro__:
        if _is_ours(each) and any(
            isinstance(made, DefaultHandler) and made.trait_name == name
            for made in vars(each).values()
        ):
            return "made when the program starts; see below"
    value = trait.default()
    if value is Undefined or value == "":
        return "empty" if value == "" else "none"
    if isinstance(value, (set, frozenset)):
        return literal(f"{{{', '.join(map(repr, sorted(value)))}}}" if value else "set()")
    return literal(repr(value))


def changed_defaults(cls: type[Configurable]) -> list[tuple[str, str]]:
    """Return settings of JupyterHub and its relatives that have another default in this class."""
    found = []
    for name, trait in sorted(cls.class_traits(config=True).items()):
        if _is_ours(trait.this_class):
            continue
        for each in cls.__mro__:
            if _is_ours(each) and any(
                isinstance(made, DefaultHandler) and made.trait_name == name
                for made in vars(each).values()
            ):
                found.append((name, trait.this_class.__name__))
                break
    return found


class Settings(Generated):
    """``{settings} GPUQueue``: a section for the class, and one for each of its settings."""

    required_arguments = 1

    def markdown(self) -> Iterator[str]:
        """Yield the sections of the class and of its settings."""
        name = self.arguments[0]
        cls = documented()[name]
        self.uses(*(sys.modules[each.__module__] for each in cls.__mro__ if _is_ours(each)))
        yield f"# `c.{name}`"
        yield ""
        yield plain(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0])
        yield ""
        for setting, trait in settings_of(cls).items():
            full = f"{name}.{setting}"
            yield from self.heading(2, "setting", full, f"`c.{full}`")
            yield f"Type: {plain(type_of(trait))}. Default: {default_of(cls, setting, trait)}."
            yield from rst(_as_rst(inspect.cleandoc(trait.help)))


def _as_rst(text: str) -> str:
    """Return help as reStructuredText, with code in double backticks only."""
    return re.sub(r"(?<![`:])`([^`\n]+)`(?![`_])", r"``\1``", text)


class SettingsTable(Generated):
    """``{settings-table}``: every setting in one table."""

    def markdown(self) -> Iterator[str]:
        """Yield the table."""
        rows = []
        for name, cls in documented().items():
            for setting, trait in settings_of(cls).items():
                first = inspect.cleandoc(trait.help).split("\n\n")[0]
                sentence = re.split(r"(?<=[.:])\s", first, maxsplit=1)[0]
                full = f"{name}.{setting}"
                shown = plain(sentence.rstrip(".:").replace("``", "`"))
                rows.append((refer("setting", full, f"c.{full}"), shown))
        yield from table(("Setting", "What it says"), rows)


class ChangedDefaults(Generated):
    """``{changed-defaults}``: settings that are not ours and have another default."""

    def markdown(self) -> Iterator[str]:
        """Yield a table for all classes."""
        rows: dict[tuple[str, str], list[str]] = {}
        changed = {name: set(changed_defaults(cls)) for name, cls in configurables().items()}
        for name, cls in configurables().items():
            parents = [each.__name__ for each in cls.__mro__[1:]]
            for setting, owner in sorted(changed[name]):
                if not any((setting, owner) in changed.get(parent, ()) for parent in parents):
                    rows.setdefault((setting, owner), []).append(f"`{name}`")
        yield from table(
            ("Setting", "Of", "Has another default in"),
            ((f"`{s}`", f"`{o}`", ", ".join(names)) for (s, o), names in sorted(rows.items())),
        )


def shorten_contents(app: Any, doctree: nodes.document) -> None:
    """Leave the name of a setting in the page's contents, which are below the class's name."""
    for code in app.env.tocs[app.env.docname].findall(nodes.literal):
        if match := re.fullmatch(r"c\.\w+\.(\w+)", code.astext()):
            code.children = [nodes.Text(match[1])]
