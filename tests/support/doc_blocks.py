"""The code in the pages of docs, as CommonMark reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt

from tests.support.processes import REPO

DOCS = REPO / "docs"


def pages() -> list[Path]:
    """Return every page."""
    return sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)


def code_in(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and text of each block, and of each code in a sentence (language '')."""
    for token in MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8")):
        if token.type == "fence" and not token.info.startswith("{"):  # a directive
            yield token.info, token.content
        for child in token.children or ():
            if child.type == "code_inline":
                yield "", child.content


def shell_in(page: Path) -> list[str]:
    """Return the blocks that a reader types."""
    return [text for language, text in code_in(page) if language == "shell"]
