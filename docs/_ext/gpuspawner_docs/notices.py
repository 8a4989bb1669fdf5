"""Notices: their kinds, the events that an admin's command gets, and examples from the tests."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jinja2
from sphinx.pycode import ModuleAnalyzer

from .operations import REPO
from .page import Generated, plain, table

RECORDED = REPO / "tests" / "golden" / "recorded" / "notices.txt"
"""Every notice, with its situation, as the tests compare it with the code."""


class _Anything(jinja2.ChainableUndefined):
    """Stands for every value that a template fills in."""

    def __str__(self) -> str:
        return "…"

    def __format__(self, spec: str) -> str:
        return "…"

    def _itself(self, *others: object) -> _Anything:
        return self

    def _never(self, *others: object) -> bool:
        return False

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __truediv__ = __mod__ = __call__ = _itself
    __lt__ = __le__ = __gt__ = __ge__ = _never


def events() -> Iterator[tuple[str, str]]:
    """Yield each event with the title of its notice, as a template gives it without values."""
    from gpuspawner.notifications import service

    source = service._TEMPLATES
    shown = jinja2.Environment(
        loader=source.loader, undefined=_Anything, extensions=["jinja2.ext.do"]
    )
    shown.filters |= {"credits": str, "deadline": lambda value, now=None: str(value)}
    for name in sorted(source.list_templates()):
        text = source.loader.get_source(source, name)[0] if source.loader else ""
        if "set title" not in text:
            continue  # a part of others
        module: Any = shown.get_template(name).make_module({})
        yield name.removesuffix(".txt"), " ".join(str(module.title).split())


def examples() -> dict[str, list[tuple[str, str, str]]]:
    """Return situation, title and text of the recorded notices, by kind."""
    found: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    situation = title = kind = ""
    for line in RECORDED.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            situation = line[2:]
        elif match := re.match(r"(\w+) to \w+: (.*)", line):
            kind, title = match.groups()
        elif line.startswith("  ") and kind:
            found[kind].append((situation, title, line.strip()))
            kind = ""
    return found


class Notices(Generated):
    """``{notices}``: a section for each kind, with examples."""

    def markdown(self) -> Iterator[str]:
        """Yield the sections."""
        from gpuspawner.notifications import models

        self.uses(models)
        self.env.note_dependency(str(RECORDED))
        told = ModuleAnalyzer.for_module(models.__name__).find_attr_docs()
        recorded = examples()
        for kind in models.NoticeKind:
            yield from self.heading(1, "notice", kind.value)
            yield plain(" ".join(told["NoticeKind", kind.name]).strip())
            yield ""
            rows = (
                (plain(situation), plain(title), plain(text))
                for situation, title, text in recorded.get(kind.value, ())
            )
            yield from table(("Situation", "Title", "Text"), rows)


class Events(Generated):
    """``{events}``: the events that an admin's command gets, with the titles of the notices."""

    def markdown(self) -> Iterator[str]:
        """Yield the table."""
        rows = ((f"`{event}`", plain(title)) for event, title in events())
        yield from table(("Event", "Title of the notice"), rows)
