"""The frame of the command: help, completion, tables, and pulls on terminals."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator

import pytest
from rich.cells import cell_len

from gpuspawner.cli import output
from gpuspawner.cli.app import COMMANDS, UnloadedCommand, main
from gpuspawner.engines.images import PullProgress

WITHOUT_HEAVY_MODULES = """
import sys
heavy = {"alembic", "docker", "jupyterhub", "rich", "sqlalchemy", "tornado", "traitlets"}
import gpuspawner
assert gpuspawner.__version__ and not heavy & set(sys.modules)
from gpuspawner.cli.app import main
assert main(["--help"]) == 0
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def test_package_and_help_import_neither_the_hub_nor_the_database() -> None:
    command = [sys.executable, "-c", WITHOUT_HEAVY_MODULES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "List the balance of every account." in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_command_help_matches_the_command_list(name: str) -> None:
    module, sentence = COMMANDS[name]
    command = UnloadedCommand(name, module, sentence).load()
    assert (command.name, command.help) == (name, sentence)


def test_shell_completes_commands_and_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_GPUSPAWNER_COMPLETE", "bash_complete")

    def completed(words: str) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        with pytest.raises(SystemExit):
            main([])
        return capsys.readouterr().out.split()

    assert completed("gpuspawner qu") == ["plain,queue"]
    assert completed("gpuspawner queue mo") == ["plain,move"]
    assert completed("gpuspawner simulate --tr") == ["plain,--trace"]


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


HEADERS = ("ID", "CREDITS", "REASON")
ROWS = [("1", "12.50", "[bold]for 学生\x1b[31m " + "and more " * 20), ("2", "7.00", "-")]


def test_table_fits_the_terminal_and_is_plain_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Screen(True))
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

    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setenv("COLUMNS", "20")
    first, *_, last = output.table(HEADERS, ROWS, right=("CREDITS",)).splitlines()
    assert (first, last) == ("ID  CREDITS  REASON", "2      7.00  -")


# A pull on a terminal is one line that is written over.


STEPS = [
    PullProgress(0, 2, 0, 100_000_000),
    PullProgress(1, 2, 50_000_000, 100_000_000),
    PullProgress(2, 2, 1, 1),
]


def screen_of(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> Screen:
    made = Screen(terminal)
    monkeypatch.setattr("sys.stderr", made)
    monkeypatch.setattr(output, "LINE_EVERY", 0.0)
    monkeypatch.setenv("COLUMNS", "60")
    return made


@pytest.mark.parametrize("terminal", [True, False])
def test_pull_progress_shows_each_step(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = screen_of(terminal, monkeypatch)
    output.follow("lab", iter([*STEPS, STEPS[-1]]))
    text = screen.getvalue()
    if screen.terminal:
        shown = text.split("\r\x1b[K")
        assert len(shown) == 4, "the same again is not drawn again"
        assert text.endswith("\n") and text.count("\n") == 1
        assert max(map(len, shown)) <= 60
    else:
        assert text.count("\n") == 4 and "\r" not in text
    assert "lab [############------------]  50%  50 of 100 MB" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_interrupted_pull_ends_its_progress_line(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = screen_of(terminal, monkeypatch)

    def failing() -> Iterator[PullProgress]:
        yield STEPS[1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        output.follow("lab", failing())
    assert screen.getvalue().endswith("\n")
