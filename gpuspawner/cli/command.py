"""What all commands share: their class, common options, parameters and errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from . import DEFAULT_FILE

if TYPE_CHECKING:
    from .config import Settings
import sys
import traceback
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError
from traitlets import TraitError

from ..core.errors import ConfigError, GPUSpawnerError, InvalidRequest, StoreUnavailable
from ..core.units import parse_credits
from ..ledger.grant_files import MOST
from ..ledger.models import check_account, member_account
from ..ledger.pricing import parse_moment
from ..queue.service import LAST_POSITION
from .config import passwords, redact

_NEGATIVE = re.compile(r"-\d+(\.\d*)?|-\.\d+")


@dataclass(slots=True)
class Invocation:
    """The common options, from anywhere on the command line. The last of each counts."""

    config: str | None = None
    database: str | None = None
    json: bool = False
    debug: bool = False
    settings: Settings | None = None

    def load(self) -> Settings:
        """Read the configuration. Raises ConfigError."""
        from .config import load  # imports SQLAlchemy, which help does not need

        self.settings = load(self.config, self.database)
        return self.settings


def wants_json() -> bool:
    """Return True if the running command was given ``--json``."""
    return click.get_current_context().ensure_object(Invocation).json


def _keep(context: click.Context, option: click.Parameter, value: Any) -> None:
    if value:
        setattr(context.ensure_object(Invocation), str(option.name), value)


def _common_options() -> list[click.Parameter]:
    config = f"the hub's configuration (default: {DEFAULT_FILE})"
    url = "URL of the hub's database (default: from the configuration or GPUSPAWNER_DATABASE_URL)"
    return [
        _common("-f", "--config", metavar="FILE", help=config),
        _common("--database", metavar="URL", help=url),
        _common("--json", is_flag=True, help="print JSON, for scripts"),
        _common("--debug", is_flag=True, hidden=True),
    ]


def _common(*names: str, **attributes: Any) -> click.Option:
    return click.Option(names, expose_value=False, callback=_keep, **attributes)


class Command(click.Command):
    """A command with the common options. Its function gets the settings first."""

    def __init__(
        self,
        name: str | None,
        *,
        params: Sequence[click.Parameter] | None = None,
        **attributes: Any,
    ) -> None:
        super().__init__(name, params=[*_common_options(), *(params or ())], **attributes)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. A negative number is an argument, not an option."""
        ctx.ignore_unknown_options = any(_NEGATIVE.fullmatch(word) for word in args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, unless it is a group with a subcommand."""
        if ctx.invoked_subcommand is not None or self.callback is None:
            return None
        settings = ctx.ensure_object(Invocation).load()
        return ctx.invoke(self.callback, settings, **ctx.params)


class CommandGroup(click.Group, Command):
    """A command with subcommands. Its own function runs if none is given."""

    command_class = Command

    def __init__(self, name: str | None, **attributes: Any) -> None:
        super().__init__(name, invoke_without_command=True, **attributes)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the subcommands in the order in which they are declared."""
        return list(self.commands)

    def add_same(self, name: str, help: str) -> None:
        """Add a subcommand that does the same as the group alone, with the same options."""
        own = [param for param in self.params if param.expose_value]
        self.add_command(Command(name, callback=self.callback, params=own, help=help))


def command(
    name: str | None = None, **attributes: Any
) -> Callable[[Callable[..., int | None]], Command]:
    """Make a command of a function that returns the exit code, or None for 0."""
    return click.command(name, cls=Command, **attributes)


def group(
    name: str | None = None, **attributes: Any
) -> Callable[[Callable[..., int | None]], CommandGroup]:
    """Make a group of the function that runs without a subcommand."""
    return click.group(name, cls=CommandGroup, **attributes)


REFUSED, USAGE = 1, 2


def report(error: Exception, invocation: Invocation) -> int:
    """Print what went wrong on stderr, without passwords, and return the exit code."""
    urls = [invocation.database or ""]
    if invocation.settings is not None:
        urls.append(invocation.settings.database_url)
    secrets = passwords(*urls)
    if invocation.debug:
        print(redact(traceback.format_exc(), secrets), file=sys.stderr)
    sentence, code = explain(error)
    print(f"gpuspawner: {redact(sentence, secrets)}", file=sys.stderr)
    return code


def explain(error: Exception) -> tuple[str, int]:
    """Return the sentence and the exit code of an error."""
    if isinstance(error, ConfigError):
        return error.message, USAGE
    if isinstance(error, StoreUnavailable):
        why = f" It says: {_cause(error.__cause__)}" if error.__cause__ else ""
        return f"{error.message}{why}", REFUSED
    if isinstance(error, GPUSpawnerError):
        return error.message, REFUSED
    if isinstance(error, SQLAlchemyError):
        return f"The database refused: {_cause(error)}", REFUSED
    if isinstance(error, TraitError):
        return f"The configuration is not valid: {error}", USAGE
    what = f"Something unexpected went wrong ({type(error).__name__}: {error})."
    return f"{what} Run it again with --debug for the details.", REFUSED


def _cause(error: BaseException) -> str:
    """Return a database error in the database's own words, on one line."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


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
        sentence = f"{text[:60]!r} is no number of points: write it like 5 or -2.5"
        raise ValueError(sentence) from None


def _account(text: str) -> str:
    named = text.startswith(("member:", "group:", "system:"))
    return check_account(text if named else member_account(text))


_read_days = _number(9_999, "no number of days: write 30, say")
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
RATE_ID = Parsed("id", _number(2**63 - 1, "no number of a rate; the list has it under ID"))
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
