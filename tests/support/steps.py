"""The steps in pages of docs, as those who follow them type them."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.doc_blocks import DOCS, Block, blocks_in, shell_in

BOX = DOCS / "tutorials/your-gpu-box.md"
TLS = DOCS / "how-to/production/put-it-behind-tls.md"
COMPOSE = DOCS / "how-to/production/run-it-in-compose.md"
TRY_IT = DOCS / "tutorials/try-it.md"
SCRIPT = DOCS / "how-to/members/use-it-from-a-script.md"
PYTHON = DOCS / "how-to/members/use-it-from-python.md"
REQUEST = DOCS / "reference/requests.md"

FOLLOWED = {
    BOX: "tests/hub/test_box.py",
    TLS: "tests/hub/test_box.py",
    COMPOSE: "tests/attacks/test_compose.py",
    TRY_IT: "tests/hub/test_demo.py",
    SCRIPT: "tests/hub/test_scripts.py",
    PYTHON: "tests/hub/test_client.py",
    REQUEST: "tests/hub/test_scripts.py",
}
"""Pages with a test of their own, which runs each block that has no reason not to be run. Those of
all others are run by tests/integration/docs/test_blocks.py."""

PROGRAMS = ("gpuspawner", "curl", "cp")
"""What a test runs for a page, one in a line."""

CURL = 'curl() { command curl --silent --show-error --fail-with-body "$@"; }'
"""What a script of Bash begins with, so that a refused request fails."""


@cache
def checks() -> Any:
    """Return the module of the documentation's build that reads commands."""
    sys.path.append(str(DOCS / "_ext"))
    return importlib.import_module("gpuspawner_docs.checks")


def typed_in(page: Path) -> list[Block]:
    """Return the blocks of a page that a reader types in a terminal, and that a test runs."""
    typed = ("shell", "console")
    return [each for each in blocks_in(page) if each.language in typed and not each.reason]


def lines_of(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Yield each command line of a block, with the lines that the page shows as its output."""
    if block.language == "shell":
        yield from ((line, []) for line in checks().lines_of(block.text))
        return
    for part in re.split(r"^(?:\$|#) ", block.text, flags=re.MULTILINE)[1:]:
        line, *shown = part.splitlines()
        yield line, shown


def calls_in(line: str) -> list[list[str]]:
    """Return the arguments of each call of ``gpuspawner`` in a command line."""
    return list(checks().calls_in(line))


def can_be_run(line: str) -> bool:
    """Return True if a command line asks only for the hub of a test, or for nothing."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    if not words or is_assignment(line):
        return True
    return Path(words[0]).name in PROGRAMS and not checks().ENDS.intersection(words)


def is_tried(block: Block) -> bool:
    """Return True if a block says why no test runs it, and a test can try whether that is so."""
    if not block.reason or block.language == "python":
        return bool(block.reason)
    lines = [line for line, _ in lines_of(block)]
    return all(calls_in(line) and can_be_run(line) for line in lines)


def is_assignment(line: str) -> bool:
    """Return True if a line only sets a variable of the shell."""
    return bool(re.fullmatch(r"(export )?[A-Z]+=\S+", line))


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
    """Return the blocks that a test runs, with what a reader types in the place of a page's words.

    Raises AssertionError for words that the page does not have, and for some in capitals left.
    """
    blocks = [each.text for each in typed_in(page)]
    for words, typed in site.items():
        assert words in "\n".join(blocks), f"{page.name} does not say {words}"
        blocks = [each.replace(words, typed) for each in blocks]
    assert "YOUR-" not in "\n".join(blocks)
    return blocks
