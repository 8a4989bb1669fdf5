"""A pull on a terminal is one line that is written over; elsewhere it is a line now and then."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from gpuspawner.cli import output
from gpuspawner.cli.output import follow
from gpuspawner.engines.images import PullProgress

STEPS = [
    PullProgress(0, 2, 0, 100_000_000),
    PullProgress(1, 2, 50_000_000, 100_000_000),
    PullProgress(2, 2, 1, 1),
]


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def screen_of(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> Screen:
    made = Screen(terminal)
    monkeypatch.setattr("sys.stderr", made)
    monkeypatch.setattr(output, "LINE_EVERY", 0.0)
    monkeypatch.setenv("COLUMNS", "60")
    return made


@pytest.mark.parametrize("terminal", [True, False])
def test_each_step_is_shown(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = screen_of(terminal, monkeypatch)
    follow("lab", iter([*STEPS, STEPS[-1]]))
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
def test_a_pull_that_fails_leaves_its_line(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = screen_of(terminal, monkeypatch)

    def failing() -> Iterator[PullProgress]:
        yield STEPS[1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow("lab", failing())
    assert screen.getvalue().endswith("\n")
