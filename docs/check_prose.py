"""Checks the words of the documentation; `make docs` runs it. Exit status 1, with file and line.

Spelling (codespell), phrases that we do not use, the length of pages, and a language on each block
of code. Links and names are checked by the build itself.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
ALSO = ("CONTRIBUTING.md", "CODE_OF_CONDUCT.md")
OURS = ("tutorials", "how-to", "explanation", "reference", "index.md", "glossary.md", *ALSO)
"""Pages whose phrases are checked. Those in contributing/ are older and have tests of their own."""

MOST_WORDS = {"how-to": 600, "explanation": 900, "tutorials": 900, "contributing": 900}

BANNED = {
    # Says nothing.
    r"\bsimply\b": "leave it out",
    r"\bjust\b": "leave it out",
    r"\beasily\b": "leave it out",
    r"\bobviously\b": "leave it out",
    r"\bof course\b": "leave it out",
    r"\bbasically\b": "leave it out",
    r"\bplease note\b": "say it",
    r"\bnote that\b": "say it",
    r"\bplease\b": "say what to do",
    r"\bin order to\b": "to",
    r"\bas well as\b": "and",
    r"\bmake sure\b": "say what to check",
    r"\bensure\b": "say what to check",
    r"\bfeel free\b": "you can",
    # Praise.
    r"\bpowerful\b": "say what it does",
    r"\bseamless(ly)?\b": "say what it does",
    r"\brobust\b": "say what it survives",
    r"\bblazing\b": "give the figure",
    r"\bcutting-edge\b": "leave it out",
    r"\bstate-of-the-art\b": "leave it out",
    r"\bworld-class\b": "leave it out",
    r"\beffortless(ly)?\b": "leave it out",
    # Longer words than needed.
    r"\bleverag(e|es|ed|ing)\b": "use",
    r"\butili[sz](e|es|ed|ing)\b": "use",
    r"\bfacilitat(e|es|ed|ing)\b": "help",
    r"\bdelv(e|es|ing)\b": "read",
    r"\bprior to\b": "before",
    r"\bsubsequently\b": "then",
    r"\bfunctionality\b": "say which",
    # Words of ours that readers do not know, and old-fashioned ones.
    r"\bbeside these\b": "name them",
    r"\bhands? on\b(?! the queue)": "transfer",
    r"\bis none\b": "is not",
    r"\bin words\b": "say how",
    r"\bgiven out\b": "granted",
    r"\ba sick card\b": "a sick GPU",
    r"\bwaiting line\b": "queue",
    r"\bthe broker\b": "name the service",
    # Other words than those of the vocabulary.
    r"\bgraphics cards?\b": "GPU",
    r"\bGPU cards?\b": "GPU",
    r"\bcoins?\b": "credits",
    r"\btokens? per hour\b": "credits per hour",
    r"\bblacklist(s|ed)?\b": "blocked",
    r"\bwhitelist(s|ed)?\b": "allowed",
    r"\bend users?\b": "member",
}
"""What is not written, and what to do instead. Code is not looked at."""

NOT_RUN = re.compile(r"^( *```\w+) not run: .*$", re.MULTILINE)
"""Why no test runs a block, after its language: no page shows it."""
HOSTS = re.compile(
    r"\b(?:docker\.io/|ghcr\.io|gcr\.io|nvcr\.io|quay\.io|pypi\.org|registry-1\.docker|hub\.docker)\b"
)
"""Hosts of registries: a page names none, for a site may have its own."""


def pages() -> list[Path]:
    """Return the files to check."""
    found = [path for path in HERE.rglob("*.md") if "_build" not in path.parts]
    return sorted([*found, *(REPO / name for name in ALSO if (REPO / name).is_file())])


def blocks_of(text: str, first: int = 1) -> Iterator[tuple[int, Token]]:
    """Yield each block of a page with the number of its line; those in a note too."""
    for token in MarkdownIt().enable("table").parse(text):
        if token.map:
            number = first + token.map[0]
            yield number, token
            if re.match(r"\{(note|warning|tip|glossary)\}", token.info):
                yield from blocks_of(token.content, number + 1)


def problems_of(path: Path) -> Iterator[str]:
    """Yield a sentence for each mistake in a page."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(REPO)
    shelf = path.relative_to(HERE).parts[0] if path.is_relative_to(HERE) else path.name
    for number, line in enumerate(text.splitlines(), start=1):
        if found := HOSTS.search(line):
            yield f"{name}:{number}: names a registry ({found[0]}): a site may have its own"
    read = NOT_RUN.sub(r"\1", text)
    if (most := MOST_WORDS.get(shelf)) and (words := len(read.split())) > most:
        yield f"{name}: {words} words; {most} are the most"
    for number, token in blocks_of(text):
        if token.type == "fence" and not token.info:
            yield f"{name}:{number}: a block without a language (text, if nothing else)"
        if token.type == "inline" and shelf in OURS:
            yield from (f"{name}:{problem}" for problem in _phrases(number, token.content))


def _phrases(first: int, text: str) -> Iterator[str]:
    # Without code, which may continue on the next line.
    prose = re.sub(r"`[^`]*`", lambda code: "`" + "\n" * code[0].count("\n") + "`", text)
    for number, line in enumerate(prose.splitlines(), start=first):
        for pattern, instead in BANNED.items():
            if found := re.search(pattern, line, re.IGNORECASE):
                yield f"{number}: '{found[0]}': {instead}"


def spelling(files: list[Path]) -> list[str]:
    """Return what codespell finds."""
    program = Path(sys.executable).with_name("codespell")
    command = [str(program), "--ignore-words-list", "thur,fo,te,nd", *map(str, files)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=REPO)
    return [line.removeprefix(f"{REPO}/") for line in done.stdout.splitlines()]


def main() -> int:
    """Check every page."""
    files = pages()
    found = [problem for path in files for problem in problems_of(path)] + spelling(files)
    for problem in found:
        print(problem, file=sys.stderr)
    if not found:
        print(f"The words of {len(files)} pages: nothing found.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
