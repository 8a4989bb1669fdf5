"""The command's grammar, and the one place where errors become sentences and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy.exc import SQLAlchemyError
from traitlets import TraitError

from .. import __version__
from ..catalog.commands import catalog
from ..catalog.commands import grammar as catalog_grammar
from ..core.errors import ConfigError, GPUSpawnerError, StoreUnavailable
from ..db.commands import audit, backup, restore, takeover
from ..devices.commands import devices
from ..leases.commands import extend, leases, release, stop
from ..ledger.commands import accounts, statement
from ..ledger.commands import grammar as giving_grammar
from ..ledger.rate_commands import grammar as rates_grammar
from ..ledger.rate_commands import rates
from ..ledger.refill_commands import grammar as refills_grammar
from ..ledger.refill_commands import refills
from ..members.commands import members, members_grammar, roster, roster_grammar
from ..queue.commands import (
    boost,
    cancel,
    drain,
    move,
    pause,
    place_of,
    points_of,
    queue,
    resume,
    simulate,
    trail,
    undrain,
)
from ..slurm.commands import slurm, slurm_grammar
from ..storage.commands import folders, folders_grammar, workspaces, workspaces_grammar
from .check import check
from .config import DEFAULT_FILE, Settings, load, passwords, redact
from .output import changes_of

OK, REFUSED, USAGE, INTERRUPTED = 0, 1, 2, 130

Command = Callable[[argparse.Namespace, Settings], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors are one sentence on stderr."""
    try:
        arguments = parser().parse_args(argv)
    except SystemExit as done:  # argparse has said what is wrong, or printed the help
        return int(done.code or 0)
    secrets: tuple[str, ...] = passwords(arguments.database or "")
    try:
        settings = load(arguments.config, arguments.database)
        secrets = passwords(settings.database_url, arguments.database or "")
        command: Command = arguments.command
        code = command(arguments, settings)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _fail(error.message, USAGE, arguments.debug, secrets)
    except StoreUnavailable as error:
        why = f" It says: {_cause(error.__cause__)}" if error.__cause__ else ""
        return _fail(f"{error.message}{why}", REFUSED, arguments.debug, secrets)
    except GPUSpawnerError as error:
        return _fail(error.message, REFUSED, arguments.debug, secrets)
    except SQLAlchemyError as error:
        return _fail(f"The database refused: {_cause(error)}", REFUSED, arguments.debug, secrets)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has enough of it; nothing more can be said there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except TraitError as error:
        return _fail(f"The configuration is not valid: {error}", USAGE, arguments.debug, secrets)
    except Exception as error:  # never a traceback
        sentence = f"Something unexpected went wrong ({type(error).__name__}: {error})."
        sentence += " Run it again with --debug for the details."
        return _fail(sentence, REFUSED, arguments.debug, secrets)


def _fail(sentence: str, code: int, debug: bool, secrets: tuple[str, ...]) -> int:
    if debug:
        print(redact(traceback.format_exc(), secrets), file=sys.stderr)
    print(f"gpuspawner: {redact(sentence, secrets)}", file=sys.stderr)
    return code


def _cause(error: BaseException) -> str:
    """A database error in the database's own words, on one line."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


def parser() -> argparse.ArgumentParser:
    """The whole grammar."""
    top = argparse.ArgumentParser(
        prog="gpuspawner",
        description="Look after the GPUs, leases and credits of a hub.",
        epilog="Exit codes: 0 done, 1 refused or a check is red, 2 bad usage.",
    )
    top.add_argument("--version", action="version", version=f"gpuspawner {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, command: Command, what: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=what, description=what, parents=[_common()])
        sub.set_defaults(command=command)
        return sub

    quick = add("check", check, "Check everything that a hub needs, line by line.")
    quick.add_argument(
        "--no-containers",
        action="store_true",
        help="start no containers: what they would prove is then not checked",
    )
    add("devices", devices, "List the GPUs and what they are doing.")

    listing = add("leases", leases, "List the open leases: who has which GPUs.")
    listing.add_argument("--all", action="store_true", help="also leases that have ended")
    listing.add_argument("--member", metavar="NAME", help="only this member's")
    listing.add_argument("--limit", type=_positive, default=50, metavar="N", help=_NEWEST)

    freeing = add("release", release, "Free a lease by hand, after its server is gone.")
    freeing.add_argument("lease", metavar="LEASE", help="the lease's id, or its first letters")
    freeing.add_argument("--yes", action="store_true", help="do not ask")
    freeing.add_argument(
        "--force",
        action="store_true",
        help="even when the server lives or nobody can say whether it does",
    )

    over = add("takeover", takeover, "Go on with the leases of another hub that is gone for good.")
    over.add_argument("--yes", action="store_true", help="do not ask")

    ending = add("stop", stop, "Have a server stopped; its member is told why.")
    ending.add_argument("server", metavar="SERVER", help=_SERVER)
    ending.add_argument("--reason", type=_words, required=True, metavar="TEXT", help="why")
    longer = add("extend", extend, "Begin a session's time anew, if nobody waits longer for it.")
    longer.add_argument("lease", metavar="LEASE", help="the lease's id, or its first letters")

    giving_grammar(add)
    lines = add("statement", statement, "Show the credits that came and went.")
    lines.add_argument("account", metavar="MEMBER", help=_ACCOUNT)
    lines.add_argument("--limit", type=_positive, default=50, metavar="N", help=_NEWEST)

    add("accounts", accounts, "List everybody's balance.")

    refills_grammar(add("refills", refills, "List what is given again and again."), _common)
    rates_grammar(add("rates", rates, "List what GPU time costs, and change it."), _common)
    catalog_grammar(add("catalog", catalog, "List the environments, and check them."), _common)
    workspaces_grammar(
        add("workspaces", workspaces, "List members' files, and pack them."), _common
    )
    folders_grammar(add("folders", folders, "List the folders that members share."), _common)
    roster_grammar(
        add("roster", roster, "List who is a member until when, and import it."), _common
    )
    members_grammar(add("members", members, "Give a member another name."), _common)
    slurm_grammar(add("slurm", slurm, "Set up and look after a cluster of machines."), _common)
    _queue_actions(add("queue", queue, "List who waits in line, and why in this order."))
    for name, command, what in (
        ("pause", pause, "Give out no GPUs: what runs goes on, who waits waits on."),
        ("resume", resume, "Give out GPUs again."),
    ):
        _reason(add(name, command, what))
    for name, command, what in (
        ("drain", drain, "Give a GPU to nobody new; the session on it ends normally."),
        ("undrain", undrain, "Give a drained GPU out again."),
    ):
        closing = add(name, command, what)
        closing.add_argument("device", metavar="DEVICE", help="its index or its UUID")
        _reason(closing)
    playing = add("simulate", simulate, "Play sessions of the past under these rules and others.")
    playing.add_argument(
        "--days", type=_positive, default=30, metavar="N", help="of the site's own past (30)"
    )
    playing.add_argument("--trace", metavar="FILE", help="a CSV of sessions instead (or .csv.gz)")
    playing.add_argument(
        "--gpus", type=_positive, metavar="N", help="so many GPUs, all alike (default: this hub's)"
    )
    playing.add_argument(
        "--policy", action="append", metavar="NAME", help="only this policy; may be given again"
    )
    changes = add("trail", trail, "Show who changed what, from the audit trail.")
    changes.add_argument("--limit", type=_positive, default=50, metavar="N", help=_NEWEST)
    proving = add("audit", audit, "Prove the books: hold every invariant against every row.")
    proving.add_argument(
        "--head", default="", help="a head of the chain that an earlier audit or backup printed"
    )
    copying = add("backup", backup, "Copy the database into a file, while the hub goes on.")
    copying.add_argument("file", metavar="FILE", help="the copy: one SQLite file")
    copying.add_argument("--overwrite", action="store_true", help="replace the file")
    returning = add("restore", restore, "Prove a copy, and put it in the place of the database.")
    returning.add_argument("file", metavar="FILE", help="what `gpuspawner backup` made")
    returning.add_argument("--check", action="store_true", help="prove it, and change nothing")
    returning.add_argument(
        "--overwrite", action="store_true", help="replace the database; the old one is kept aside"
    )
    return top


def _queue_actions(line: argparse.ArgumentParser) -> None:
    """``gpuspawner queue`` alone lists; with a word after it, it changes."""
    line.add_argument(
        "--why", nargs=2, metavar=("A", "B"), help="why one ticket goes before the other"
    )
    change = changes_of(line, _common)

    def add(name: str, command: Command, what: str) -> argparse.ArgumentParser:
        sub = change(name, command, what)
        sub.add_argument("ticket", metavar="TICKET", help=_TICKET)
        return sub

    moving = add("move", move, "Put a ticket at a position of your own, before the order.")
    moving.add_argument(
        "place", type=place_of, metavar="POSITION", help="1 is next; back: to the order again"
    )
    _reason(moving)
    boosting = add("boost", boost, "Add points to a ticket's score (0 takes them away).")
    boosting.add_argument(
        "points", type=points_of, metavar="POINTS", help="in place of the boost that it has"
    )
    _reason(boosting)
    cancelling = add("cancel", cancel, "Take a ticket out of the line; its member is told why.")
    cancelling.add_argument("--reason", type=_words, required=True, metavar="TEXT", help="why")


def _reason(command: argparse.ArgumentParser) -> None:
    command.add_argument("--reason", default="", metavar="TEXT", help="why")


_TICKET = "the ticket's id or its first letters, or its server (MEMBER or MEMBER/SERVER)"
_SERVER = "the server (MEMBER or MEMBER/SERVER), or its lease's id or first letters"
_ACCOUNT = "a member's name, or member:NAME or group:NAME"
_NEWEST = "the newest N (default: 50)"


def _common(**kwargs: Any) -> argparse.ArgumentParser:
    """Options of every command."""
    common = argparse.ArgumentParser(add_help=False, **kwargs)
    common.add_argument(
        "-f", "--config", metavar="FILE", help=f"the hub's configuration (default: {DEFAULT_FILE})"
    )
    common.add_argument(
        "--database",
        metavar="URL",
        help="the hub's database (default: what the configuration or GPUSPAWNER_DATABASE_URL says)",
    )
    common.add_argument("--json", action="store_true", help="for scripts")
    common.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)
    return common


def _words(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty: say it in words")
    return text.strip()


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 0 < number < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines: write 1 or more")
    return number
