"""Arguments and options of commands: their declaration, their types, and some shared ones.

An invalid value is a usage error, except for accounts and times, which the ledger refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import click

from ..core.errors import InvalidRequest
from ..core.units import parse_credits
from ..ledger.grant_files import MOST
from ..ledger.models import check_account, member_account
from ..ledger.pricing import parse_moment
from ..queue.service import LAST_POSITION

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def argument(name: str, metavar: str, help: str, **attributes: Any) -> Decorator:
    """Give a command a positional argument."""
    return click.argument(name, metavar=metavar, help=help, **attributes)


def option(name: str, metavar: str, help: str, parameter: str = "", **attributes: Any) -> Decorator:
    """Give a command an option with a value, for this parameter of its function."""
    names = filter(None, (name, parameter))
    return click.option(*names, metavar=metavar, help=help, **attributes)


def flag(name: str, help: str, parameter: str = "") -> Decorator:
    """Give a command an option without a value, for this parameter of its function."""
    return click.option(*filter(None, (name, parameter)), is_flag=True, help=help)


class Parsed(click.ParamType[Any, Any]):
    """A value that a function parses from text. Its ValueError says what is wrong."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value. A default value stays as it is."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _credits(text: str) -> int:
    amount = parse_credits(text)
    if amount == 0:
        raise ValueError("the amount is 0: nothing would change")
    if abs(amount) > parse_credits(MOST):
        raise ValueError(f"the amount {text} is more than {MOST:,} credits")
    return amount


def _words(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty: say it in words")
    return text.strip()


def _number(most: int, sentence: str) -> Callable[[str], int]:
    """Return a parser for a whole number from 1 on. The sentence follows the invalid text."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and 1 <= int(text[:20]) <= most):
            raise ValueError(f"{text[:60]!r} is {sentence}")
        return int(text)

    return read


def _points(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        sentence = f"{text[:60]!r} is not a number of points: write it like 5 or -2.5"
        raise ValueError(sentence) from None


def _account(text: str) -> str:
    named = text.startswith(("member:", "group:", "system:"))
    return check_account(text if named else member_account(text))


_read_days = _number(9_999, "not a number of days: write 30, say")
_read_position = _number(
    LAST_POSITION, "no position: write 1 for next, 2 for the one after it, or back"
)

ACCOUNT = Parsed("account", _account)
"""An account. A bare name is a member's. Raises LedgerError for an invalid account."""
CREDITS = Parsed("credits", _credits)
"""An amount other than 0, in whole microcredits."""
DAYS = Parsed("days", lambda text: timedelta(days=_read_days(text)))
"""A duration in whole days."""
LINES = Parsed("number", _number(2**31 - 1, "not a number of lines: write 1 or more"))
"""A number of lines, days or devices."""
PATH = click.Path(path_type=Path, readable=False)
"""A file. The command itself reports if it is unreadable."""
POINTS = Parsed("points", _points)
POSITION = Parsed("position", lambda text: 0 if text == "back" else _read_position(text))
"""A position in the queue. 0 stands for ``back``: no position of its own."""
RATE_ID = Parsed("id", _number(2**63 - 1, "not the number of a rate; the list has it under ID"))
WORDS = Parsed("text", _words)
"""Text that is not empty."""

limit_option = option("--limit", "N", "show the newest N (default: 50)", type=LINES, default=50)
reason_option = option("--reason", "TEXT", "the reason, for the audit log", default="")
required_reason_option = option("--reason", "TEXT", "the reason", type=WORDS, required=True)
yes_option = flag("--yes", "do not ask for confirmation")


def moment(text: str | None, zone: str) -> datetime | None:
    """Parse a date on the command line, in a time zone. Raises InvalidRequest."""
    if text is None:
        return None
    try:
        return parse_moment(text, zone)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
