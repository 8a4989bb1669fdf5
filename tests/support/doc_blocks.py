"""The code in the pages of docs, as CommonMark reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from tests.support.processes import REPO

DOCS = REPO / "docs"
MARK = "not run: "
"""What follows the language of a block that no test runs, before the reason why."""


@dataclass(frozen=True)
class Block:
    """A block of code in a page."""

    line: int
    language: str
    reason: str
    """Why no test runs it; empty if one does."""
    text: str


def pages() -> list[Path]:
    """Return every page."""
    return sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)


def name_of(page: Path) -> str:
    """Return a page as people name it."""
    return str(page.relative_to(DOCS))


def blocks_in(page: Path) -> Iterator[Block]:
    """Yield each block.

    Raises ValueError if something but a reason follows a block's language.
    """
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type != "fence" or token.info.startswith("{"):  # a directive
            continue
        assert token.map
        line = token.map[0] + 1
        language, _, rest = token.info.partition(" ")
        reason = rest.removeprefix(MARK)
        if rest and (reason == rest or not reason.strip()):
            raise ValueError(
                f"{page}:{line}: {MARK}REASON may follow the language, and not: {rest}"
            )
        yield Block(line, language, reason, token.content)


def code_in(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and text of each block, and of each code in a sentence (language '')."""
    yield from ((block.language, block.text) for block in blocks_in(page))
    for token in MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8")):
        for child in token.children or ():
            if child.type == "code_inline":
                yield "", child.content


def shell_in(page: Path) -> list[str]:
    """Return the blocks that a reader types."""
    return [text for language, text in code_in(page) if language == "shell"]
