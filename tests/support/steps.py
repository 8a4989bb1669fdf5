"""The steps in pages of docs, as those who follow them type them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.doc_blocks import DOCS, shell_in

BOX = DOCS / "tutorials/your-gpu-box.md"
COMPOSE = DOCS / "how-to/production/run-it-in-compose.md"


def joined(block: str) -> list[str]:
    """Return the commands of a block, each on one line and without its comment."""
    lines = block.replace("\\\n", " ").splitlines()
    return [line.partition("  #")[0].strip() for line in lines]


def command(page: Path, begins: str) -> str:
    """Return the page's one command that begins so."""
    (found,) = (
        line for block in shell_in(page) for line in joined(block) if line.startswith(begins)
    )
    return found


def filled_in(page: Path, site: Mapping[str, str]) -> Sequence[str]:
    """Return the page's blocks with what a reader types in the place of its words.

    Raises AssertionError for words that the page does not have, and for some in capitals left.
    """
    blocks = shell_in(page)
    for words, typed in site.items():
        assert words in "\n".join(blocks), f"{page.name} does not say {words}"
        blocks = [each.replace(words, typed) for each in blocks]
    assert "YOUR-" not in "\n".join(blocks)
    return blocks
