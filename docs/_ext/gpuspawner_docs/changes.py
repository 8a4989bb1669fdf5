"""The changes since the last release, as towncrier will write them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .operations import REPO
from .page import Generated


class Unreleased(Generated):
    """``{unreleased}``: what the fragments in ``changes`` say."""

    def markdown(self) -> Iterator[str]:
        """Yield what ``towncrier build --draft`` prints, without its title."""
        for path in sorted((REPO / "changes").glob("*.md")):
            self.env.note_dependency(str(path))
        program = Path(sys.executable).with_name("towncrier")
        command = [str(program), "build", "--draft", "--version", "next"]
        made = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
        if made.returncode:
            raise self.error(f"towncrier: {made.stderr.strip()}")
        for line in made.stdout.splitlines():
            if not line.startswith("## "):
                yield line[2:] if line.startswith("### ") else line
