"""The base of the generating directives, which write Markdown for MyST to render."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

KINDS = ("setting", "command", "key", "route", "scope", "metric", "alert", "notice")
"""What a page can refer to by a role of this name, such as ``{setting}`GPUQueue.policy```."""


def anchor_of(kind: str, name: str) -> str:
    """Return the anchor of an entry: ``setting-gpuqueue-policy``."""
    return nodes.make_id(f"{kind}-{name}")


class Generated(SphinxDirective, ABC):
    """A directive whose content is Markdown, generated from the code."""

    final_argument_whitespace = True

    @abstractmethod
    def markdown(self) -> Iterable[str]:
        """Yield the lines."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes that MyST makes of the lines."""
        lines = "\n".join(self.markdown()).splitlines()
        made = nodes.Element()
        # MyST attaches a heading to the section of the next higher level on the page. Here that is
        # the place of the directive.
        renderer = self.state._renderer
        before, renderer._level_to_section = renderer._level_to_section, {0: made}
        try:
            self.state.nested_parse(StringList(lines, source=self.name), 0, made, match_titles=True)
        finally:
            renderer._level_to_section = before
        return made.children

    def heading(self, level: int, kind: str, name: str, title: str = "") -> list[str]:
        """Return a heading that the role ``kind`` finds under ``name``."""
        anchor = anchor_of(kind, name)
        self.env.domains.standard_domain.note_object(
            kind, name, anchor, location=self.get_location()
        )
        return ["", f"({anchor})=", "", f"{'#' * level} {title or f'`{name}`'}", ""]

    def uses(self, *objects: Any) -> None:
        """Rebuild the page when the file of one of these modules changes."""
        for each in objects:
            if file := getattr(each, "__file__", None):
                self.env.note_dependency(file)


def refer(kind: str, name: str, title: str = "") -> str:
    """Return a reference to an entry, which the build checks."""
    return f"{{{kind}}}`{title or name} <{name}>`"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table; no lines if there are no rows."""
    found = [[_cell(cell) for cell in row] for row in rows]
    if not found:
        return []
    return [
        "",
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
        *(f"| {' | '.join(row)} |" for row in found),
        "",
    ]


def _cell(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text.strip()).replace("|", "\\|")


def block(language: str, text: str) -> list[str]:
    """Return a block of code."""
    return ["", f"````{language}", *text.strip("\n").splitlines(), "````", ""]


def rst(text: str) -> list[str]:
    """Return text that is written in reStructuredText, such as the help of a setting."""
    return ["", "````{eval-rst}", ".. highlight:: python", "", *text.splitlines(), "````", ""]


def plain(text: str) -> str:
    """Return text in which all that Markdown would read as markup, except code, is escaped."""
    parts = re.split(r"(`+[^`]+`+)", text)
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = f"`{part.strip('`')}`"
        else:
            parts[index] = re.sub(r"([\\*_<>\[\]#{}$])", r"\\\1", part)
    return "".join(parts)


def literal(text: object) -> str:
    """Return text as code, in a table too."""
    shown = str(text)
    return f"`{shown}`" if shown else ""
