"""What every command shares: its common options, its settings and its place in a group."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from . import DEFAULT_FILE

if TYPE_CHECKING:
    from .config import Settings

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
        """Read the configuration, and say on stderr whose it is. Raises ConfigError."""
        from .config import load  # imports SQLAlchemy, which help does not need

        self.settings = load(self.config, self.database)
        if self.settings.found and not self.json:
            click.echo(self.settings.describe_hub(), err=True)
        return self.settings


def wants_json() -> bool:
    """Return True if the running command was given ``--json``."""
    return click.get_current_context().ensure_object(Invocation).json


def _keep(context: click.Context, option: click.Parameter, value: Any) -> None:
    if value:
        setattr(context.ensure_object(Invocation), str(option.name), value)


def _common_options() -> list[click.Parameter]:
    config = f"the hub's configuration (default: {DEFAULT_FILE} here, else the demo's)"
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
