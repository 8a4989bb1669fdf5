"""The ``gpuspawner`` command: its subcommands, and the only conversion of errors to exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from .. import __version__
from .command import Invocation

OK, INTERRUPTED = 0, 130

# The module that has a command of this name, and its help. The sentences are here instead of beside
# the functions, so that the list of commands imports none of these modules.
COMMANDS = {
    "check": ("cli.check", "Check everything that a hub needs, line by line."),
    "devices": ("devices.commands", "List the GPUs and what they are doing."),
    "leases": ("leases.commands", "List the open leases: who has which GPUs."),
    "release": ("leases.commands", "Free a lease by hand, after its server is gone."),
    "takeover": ("db.commands", "Go on with the leases of another hub that is gone for good."),
    "stop": ("leases.commands", "Have a server stopped; its member is told why."),
    "extend": ("leases.commands", "Begin a session's time anew, if nobody waits longer for it."),
    "grant": ("ledger.commands", "Give credits to a member or a group (minus takes back)."),
    "refund": (
        "ledger.commands",
        "Give back what a lease cost, or a part: its GPU was sick, say.",
    ),
    "reverse": ("ledger.commands", "Undo a transfer of the ledger by its opposite, once."),
    "payer": ("ledger.commands", "Say which account pays for a member who does not choose one."),
    "statement": ("ledger.commands", "Show the credits that came and went."),
    "accounts": ("ledger.commands", "List everybody's balance."),
    "refills": ("ledger.refill_commands", "List what is given again and again."),
    "rates": ("ledger.rate_commands", "List what GPU time costs, and change it."),
    "catalog": ("catalog.commands", "List the environments, and check them."),
    "workspaces": ("storage.commands", "List members' files, and pack them."),
    "folders": ("storage.commands", "List the folders that members share."),
    "roster": ("members.commands", "List who is a member until when, and import it."),
    "members": ("members.commands", "Give a member another name."),
    "slurm": ("slurm.commands", "Set up and look after a cluster of machines."),
    "queue": ("queue.commands", "List who waits in line, and why in this order."),
    "pause": ("queue.commands", "Give out no GPUs: what runs goes on, who waits waits on."),
    "resume": ("queue.commands", "Give out GPUs again."),
    "drain": ("queue.commands", "Give a GPU to nobody new; the session on it ends normally."),
    "undrain": ("queue.commands", "Give a drained GPU out again."),
    "simulate": ("queue.commands", "Play sessions of the past under these rules and others."),
    "trail": ("queue.commands", "Show who changed what, from the audit trail."),
    "audit": ("db.commands", "Prove the books: hold every invariant against every row."),
    "backup": ("db.commands", "Copy the database into a file, while the hub goes on."),
    "restore": ("db.commands", "Prove a copy, and put it in the place of the database."),
}


class UnloadedCommand(click.Command):
    """A command in the list, whose module is imported when it is called."""

    def __init__(self, name: str, module: str, help: str) -> None:
        super().__init__(name, help=help, short_help=help)
        self.module = module

    def load(self) -> click.Command:
        """Import the command."""
        module = import_module(f"{__package__.rpartition('.')[0]}.{self.module}")
        command: click.Command = getattr(module, str(self.name))
        command.help = self.help
        return command


class Application(click.Group):
    """The group of all commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which they are declared."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name, with its module imported."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, UnloadedCommand) else command, rest

    def invoke(self, ctx: click.Context) -> int:
        """Run the command and return its exit code. Errors are one sentence on stderr."""
        try:
            code: int | None = super().invoke(ctx)
            sys.stdout.flush()
        except (click.ClickException, click.exceptions.Exit):
            raise
        except KeyboardInterrupt:
            return INTERRUPTED
        except BrokenPipeError:
            # The reader of our output has closed it; nothing more can be said there.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return OK
        except Exception as error:  # never a traceback
            from .errors import report  # imports SQLAlchemy, whose errors it handles

            return report(error, ctx.ensure_object(Invocation))
        return code or OK


application = click.version_option(__version__, message="%(prog)s %(version)s")(
    Application(
        "gpuspawner",
        commands=[UnloadedCommand(name, *rest) for name, rest in COMMANDS.items()],
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        no_args_is_help=False,
        help="Look after the GPUs, leases and credits of a hub.",
        epilog="Exit codes: 0 done, 1 refused or a check is red, 2 bad usage.",
    )
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    extra: dict[str, Any] = {"obj": Invocation()}
    try:
        code: int = application.main(
            arguments, prog_name="gpuspawner", standalone_mode=False, **extra
        )
    except click.ClickException as error:
        error.show()
        return error.exit_code
    return code
