"""The frame of the command: what help imports, what completes words, and tables on terminals."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.cells import cell_len

from gpuspawner.cli import output
from gpuspawner.cli.app import COMMANDS, UnloadedCommand

WITHOUT_HEAVY_MODULES = """
import sys
from gpuspawner.cli.app import main
assert main(["--help"]) == 0
heavy = {"alembic", "docker", "jupyterhub", "rich", "sqlalchemy", "tornado", "traitlets"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def run(*words: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_help_imports_neither_the_hub_nor_the_database() -> None:
    assert "List everybody's balance." in run("-c", WITHOUT_HEAVY_MODULES)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_the_help_of_the_list(name: str) -> None:
    module, sentence = COMMANDS[name]
    command = UnloadedCommand(name, module, sentence).load()
    assert (command.name, command.help) == (name, sentence)


def test_a_shell_completes_commands_and_their_options() -> None:
    def completed(words: str) -> list[str]:
        environment = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        code = "from gpuspawner.cli.app import main; main()"
        printed = run("-c", code, _GPUSPAWNER_COMPLETE="bash_complete", **environment)
        return printed.split()

    assert completed("gpuspawner qu") == ["plain,queue"]
    assert completed("gpuspawner queue mo") == ["plain,move"]
    assert completed("gpuspawner simulate --tr") == ["plain,--trace"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


HEADERS = ("ID", "CREDITS", "REASON")
ROWS = [("1", "12.50", "[bold]for 学生\x1b[31m " + "and more " * 20), ("2", "7.00", "-")]


def test_a_table_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "20")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    lines = output.table(HEADERS, ROWS, right=("CREDITS",)).splitlines()
    assert max(map(cell_len, lines)) <= 60
    assert lines[0].split() == list(HEADERS)
    assert lines[0].index("CREDITS") + len("CREDITS") == lines[-1].index("7.00") + len("7.00")
    assert "[bold]for 学生?[31m" in lines[2], "no cell is read as markup or moves the cursor"
    assert sum(line.count("more") for line in lines) == 20


def test_a_table_elsewhere_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setenv("COLUMNS", "20")
    first, *_, last = output.table(HEADERS, ROWS, right=("CREDITS",)).splitlines()
    assert (first, last) == ("ID  CREDITS  REASON", "2      7.00  -")
