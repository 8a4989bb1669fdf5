"""Attempts to do what nobody may: counted, and said in the summary of the run."""

from __future__ import annotations

from typing import Any

import pytest

PROPERTY = "attack"
UNCOUNTED = "attack that proves nothing"


class Attempts:
    """``attempts("a forged token", refused=status == 403)``: every attempt of one test."""

    def __init__(self, node: Any) -> None:
        self._properties: list[tuple[str, object]] = node.user_properties
        self.succeeded: list[str] = []
        self.uncounted: list[str] = []
        """What nobody could have done here, not even those who may."""

    def __call__(self, what: str, *, refused: bool, counts: bool = True) -> None:
        """Note one attempt; :meth:`close` fails the test when one was not refused.

        ``counts``: whether the same request works for somebody who may make it.
        """
        if refused and not counts:
            self.uncounted.append(what)
            self._properties.append((UNCOUNTED, what))
            return
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
        self.uncounted: list[str] = []
        self.succeeded: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "teardown":
            return
        noted = [(name, str(value)) for name, value in report.user_properties]
        found = [value for name, value in noted if name == PROPERTY]
        self.made += len(found)
        self.uncounted += [
            str(value) for name, value in report.user_properties if name == UNCOUNTED
        ]
        self.succeeded += [value for value in found if value != "refused"]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.made:
            return
        for value in self.succeeded:
            terminalreporter.write_line(value, red=True)
        for value in self.uncounted if terminalreporter.config.option.verbose > 0 else ():
            terminalreporter.write_line(f"not counted: {value}")
        count = f"attacks: {self.made} attempts, {len(self.succeeded)} succeeded"
        if self.uncounted:
            count += f" ({len(self.uncounted)} more are not counted: nobody could do that here)"
        terminalreporter.write_line(count, red=bool(self.succeeded), green=not self.succeeded)
