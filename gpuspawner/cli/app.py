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

# The module of each command, and its help. The help is here and not with the functions, so that
# listing the commands imports none of these modules.
COMMANDS = {
    "init": ("install.commands", "Install a hub on this machine, or change how it is installed."),
    "upgrade": ("install.commands", "Upgrade the hub's database, or put it back if that fails."),
    "uninstall": ("install.commands", "Remove the hub; members' files and the database stay."),
    "check": ("cli.check", "Check everything that the hub needs, one line per check."),
    "devices": ("devices.commands", "List the GPUs and what they are doing."),
    "mig": ("sharing.commands", "Divide GPUs into MIG instances, and restore them at boot."),
    "leases": ("leases.commands", "List the open leases: who has which GPUs."),
    "release": ("leases.commands", "Release a lease by hand after its server is gone."),
    "takeover": ("db.commands", "Take over the leases and queue of a hub that is gone for good."),
    "stop": ("leases.commands", "Stop a server; its member is told why."),
    "extend": (
        "leases.commands",
        "Restart a session's time limit if no waiting ticket is delayed.",
    ),
    "grant": ("ledger.commands", "Grant credits to a member or a group (negative: take back)."),
    "refund": ("ledger.commands", "Refund a lease's cost or a part of it, such as for a sick GPU."),
    "reverse": ("ledger.commands", "Reverse a ledger transfer, once, by posting its opposite."),
    "payer": ("ledger.commands", "Set which account pays for a member who does not choose one."),
    "statement": ("ledger.commands", "Show an account's balance and its newest ledger lines."),
    "accounts": ("ledger.commands", "List the balance of every account."),
    "refills": ("ledger.refill_commands", "List or change the recurring grants of credits."),
    "rates": ("ledger.rate_commands", "List or change the prices of GPU time."),
    "catalog": ("catalog.commands", "List and check the environments, and manage their images."),
    "workspaces": ("storage.commands", "List, archive, restore or delete members' workspaces."),
    "folders": ("storage.commands", "List or change the folders that members share."),
    "roster": (
        "members.commands",
        "Show the roster, or import a list of who may sign in, and until when.",
    ),
    "members": ("members.commands", "Rename a member."),
    "slurm": ("slurm.commands", "Set up and maintain a Slurm cluster."),
    "queue": ("queue.commands", "Show the queue and the reasons for its order, or change it."),
    "pause": (
        "queue.commands",
        "Pause granting GPUs; sessions continue and tickets keep their places.",
    ),
    "resume": ("queue.commands", "Resume granting GPUs."),
    "drain": ("queue.commands", "Take a GPU out of service; its session ends normally."),
    "undrain": ("queue.commands", "Return a drained GPU to service."),
    "simulate": (
        "queue.commands",
        "Replay past sessions under the current and alternative policies.",
    ),
    "trail": ("queue.commands", "Show the audit log: who changed what, and when."),
    "audit": ("db.commands", "Verify the database: check every invariant on every row."),
    "backup": ("db.commands", "Back up the database to a file while the hub keeps running."),
    "restore": ("db.commands", "Check a backup, then replace the database with it."),
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
            from .errors import report

            return report(error, ctx.ensure_object(Invocation))
        return code or OK


application = click.version_option(__version__, message="%(prog)s %(version)s")(
    Application(
        "gpuspawner",
        commands=[UnloadedCommand(name, *rest) for name, rest in COMMANDS.items()],
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        no_args_is_help=False,
        help="Manage the GPUs, leases and credits of a hub.",
        epilog="Exit codes: 0 success, 1 refusal or failed check, 2 usage or config error.",
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
