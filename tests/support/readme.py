"""README.md as those who follow it read it: its chapters, and the commands in them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tests.support.processes import REPO

BOX = "On a real GPU box"
COMPOSE = "docker compose"


def chapter(title: str) -> str:
    """Return what stands below the heading, down to the next one."""
    text = (REPO / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)^#+ ", text, re.MULTILINE | re.DOTALL)
    assert found, f"README.md has no chapter {title}"
    return found[1]


def commands(title: str) -> list[str]:
    """Return the chapter's fenced blocks of shell commands."""
    return re.findall(r"^```sh\n(.*?)^```$", chapter(title), re.MULTILINE | re.DOTALL)


def joined(block: str) -> list[str]:
    """Return the commands of a block, each on one line and without its comment."""
    lines = block.replace("\\\n", " ").splitlines()
    return [line.partition("  #")[0].strip() for line in lines]


def command(title: str, begins: str) -> str:
    """Return the chapter's one command that begins so."""
    every = [line for block in commands(title) for line in joined(block)]
    (found,) = (line for line in every if line.startswith(begins))
    return found


def filled_in(blocks: list[str], site: Mapping[str, str]) -> list[str]:
    """Return the blocks with what a reader types in the place of the README's words.

    Raises AssertionError for words that the README does not have, and for some in capitals left.
    """
    everything = "\n".join(blocks)
    for words, typed in site.items():
        assert words in everything, f"README.md does not say {words}"
        blocks = [each.replace(words, typed) for each in blocks]
    assert "YOUR-" not in "\n".join(blocks)
    return blocks
