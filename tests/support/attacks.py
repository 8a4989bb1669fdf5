"""Attempts to do what nobody may: counted, and said in the summary of the run."""

from __future__ import annotations

from typing import Any

import pytest

PROPERTY = "attack"


class Attempts:
    """``attempts("a forged token", refused=status == 403)``: every attempt of one test."""

    def __init__(self, node: Any) -> None:
        self._properties: list[tuple[str, object]] = node.user_properties
        self.succeeded: list[str] = []

    def __call__(self, what: str, *, refused: bool) -> None:
        """Note one attempt; :meth:`close` fails the test when one was not refused."""
        self._properties.append((PROPERTY, "refused" if refused else f"SUCCEEDED: {what}"))
        if not refused:
            self.succeeded.append(what)

    def close(self) -> None:
        """Fail if an attempt succeeded, and say which."""
        assert not self.succeeded, "these attacks succeeded:\n" + "\n".join(self.succeeded)


class Summary:
    """Counts the attempts of all tests, also of those that other processes ran."""

    def __init__(self) -> None:
        self.made = 0
        self.succeeded: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "teardown":
            return
        found = [str(value) for name, value in report.user_properties if name == PROPERTY]
        self.made += len(found)
        self.succeeded += [value for value in found if value != "refused"]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.made:
            return
        for value in self.succeeded:
            terminalreporter.write_line(value, red=True)
        count = f"attacks: {self.made} attempts, {len(self.succeeded)} succeeded"
        terminalreporter.write_line(count, red=bool(self.succeeded), green=not self.succeeded)
