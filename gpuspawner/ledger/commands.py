"""The commands that grant, refund and reverse credits, and that show accounts."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from ..cli.config import Settings
from ..cli.output import count, credits, default_actor, exact, local, note, show, table, utc
from ..core.errors import ConfigError, InvalidRequest, UnknownAccount, UnknownLease
from ..core.units import parse_credits
from ..queue.commands import actor
from ..services import Broker
from .grant_files import MOST, MOST_BYTES
from .grants import Bulk
from .models import Account, check_account, member_account
from .pricing import parse_moment
from .repository import StatementLine


def grant(arguments: argparse.Namespace, settings: Settings) -> int:
    """Give credits to an account, or take some back with a negative amount."""
    broker = settings.open_broker()
    name = account_name(arguments.account)
    actor = arguments.actor or default_actor()
    if arguments.open:
        _open(broker, name, actor)
    before = find_account(broker, name, "Open it now with --open.")
    done = broker.grant(
        name,
        arguments.amount,
        actor=actor,
        reason=arguments.reason,
        key=f"grant:{arguments.key}" if arguments.key else "",
        until=moment(arguments.until, broker.rate_zone),
    )
    account = broker.account(name)
    value = {"granted": done, "amount": exact(arguments.amount), **_plain_account(account)}
    verb, way = ("gave", "to") if arguments.amount > 0 else ("took", "from")
    text = f"{verb.capitalize()} {credits(abs(arguments.amount))} credits {way} {name}"
    if not done:
        text = f"Nothing changed: a grant with the key {arguments.key!r} was made before"
    show(
        arguments.json,
        value,
        f"{text}. The balance is {credits(account.balance)} credits"
        + (f" (was {credits(before.balance)})." if done else "."),
    )
    return 0


def statement(arguments: argparse.Namespace, settings: Settings) -> int:
    """Show the newest lines of an account, newest first."""
    broker = settings.open_broker()
    name = account_name(arguments.account)
    account = find_account(broker, name)
    lines, ending = broker.statement(name, arguments.limit), broker.lots_of(name)
    value = {
        **_plain_account(account),
        "ending": [{"at": utc(lot.ends_at), "amount": exact(left)} for lot, left in ending],
        "lines": [_plain_line(line) for line in lines],
    }
    headers = ("TIME", "WHAT", "AMOUNT", "BALANCE", "BY", "LEASE", "TRANSFER", "REASON")
    rows = [
        (
            local(line.at),
            line.kind,
            credits(line.amount),
            credits(line.balance),
            line.actor,
            line.lease_id or "-",
            line.transfer_id[:8],
            line.reason,
        )
        for line in lines
    ]
    parts = [_sentence(account)]
    parts += [
        f"{credits(left)} of them end at {local(lot.ends_at)}." for lot, left in ending if left
    ]
    if lines:
        parts += ["", table(headers, rows, right=("AMOUNT", "BALANCE"))]
    if len(lines) == arguments.limit:
        parts += ["", f"These are the newest {count(len(lines), 'line')}; --limit shows more."]
    show(arguments.json, value, "\n".join(parts))
    return 0


def accounts(arguments: argparse.Namespace, settings: Settings) -> int:
    """List every member's and group's account."""
    found = settings.open_broker().accounts()
    headers = ("ACCOUNT", "BALANCE", "HELD", "AVAILABLE")
    rows = [(a.name, credits(a.balance), credits(a.held), credits(a.available)) for a in found]
    text = table(headers, rows, right=headers[1:])
    text += f"\n\n{count(len(found), 'account')}"
    if not found:
        text = "No accounts yet: a member's opens at their first sign-in."
    show(arguments.json, [_plain_account(account) for account in found], text)
    return 0


def account_name(text: str) -> str:
    """The account that a person means: a bare name is a member's. Raises LedgerError."""
    named = text.startswith(("member:", "group:", "system:"))
    return check_account(text if named else member_account(text))


def amount_of(text: str) -> int:
    """An amount on the command line, in whole microcredits; for argparse."""
    try:
        amount = parse_credits(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if amount == 0:
        raise argparse.ArgumentTypeError("the amount is 0: nothing would change")
    if abs(amount) > parse_credits(MOST):
        raise argparse.ArgumentTypeError(f"the amount {text} is more than {MOST:,} credits")
    return amount


def moment(text: str | None, zone: str) -> datetime | None:
    """A date on the command line, by the clock of a zone. Raises InvalidRequest."""
    if text is None:
        return None
    try:
        return parse_moment(text, zone)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def find_account(broker: Broker, name: str, advice: str = "") -> Account:
    """The account, else UnknownAccount with the likeliest names and what to do."""
    try:
        return broker.account(name)
    except UnknownAccount:
        owners = {a.name.partition(":")[2]: a.name for a in broker.accounts()}
        near = difflib.get_close_matches(name.partition(":")[2], list(owners), n=3)
        meant = f" Did you mean {' or '.join(owners[o] for o in near)}?" if near else ""
        opens = " A member's account opens at their first sign-in." if "member:" in name else ""
        hint = f" {advice}" if advice else ""
        sentence = f"There is no account {name!r}.{meant}{opens}{hint}"
        raise UnknownAccount(sentence, account=name) from None


def _open(broker: Broker, name: str, actor: str) -> None:
    kind, _, owner = name.partition(":")
    known = {account.name for account in broker.accounts()}
    if name in known:
        return
    if kind == "member":
        opened = broker.open_account(owner)
        note(f"Opened {name} with its opening grant of {credits(opened.balance)} credits.")
        return
    broker.open_group_account(owner, actor=actor)
    note(f"Opened {name}.")


def _sentence(account: Account) -> str:
    held = f", of which {credits(account.held)} set aside by running servers"
    return f"{account.name}: {credits(account.balance)} credits{held if account.held else ''}"


def _plain_account(account: Account) -> dict[str, Any]:
    return {
        "account": account.name,
        "balance": exact(account.balance),
        "held": exact(account.held),
        "available": exact(account.available),
    }


def _plain_line(line: StatementLine) -> dict[str, Any]:
    return {
        "at": utc(line.at),
        "kind": line.kind,
        "amount": exact(line.amount),
        "balance": exact(line.balance),
        "actor": line.actor,
        "reason": line.reason,
        "lease": line.lease_id,
        "transfer": line.transfer_id,
    }


Add = Callable[..., argparse.ArgumentParser]

_ACCOUNT = "a member's name, or member:NAME or group:NAME"
_ONCE = "do this once only, however often it is run with this key"


def grammar(add: Add) -> None:
    """The commands of this file."""
    giving = add("grant", give, "Give credits to a member or a group (minus takes back).")
    giving.add_argument("account", nargs="?", metavar="ACCOUNT", help=_ACCOUNT)
    giving.add_argument(
        "amount", nargs="?", type=amount_of, metavar="AMOUNT", help="credits, such as 12.5"
    )
    giving.add_argument("--reason", type=_words, metavar="TEXT", help="why, for the statement")
    giving.add_argument(
        "--actor", type=_words, metavar="NAME", help="who gives (default: who runs this)"
    )
    giving.add_argument("--open", action="store_true", help="open accounts that are not there")
    giving.add_argument("--key", metavar="TEXT", help=_ONCE)
    giving.add_argument(
        "--until", metavar="DATE", help="what is left then is taken back: 2027-07-01"
    )
    giving.add_argument(
        "--file", metavar="FILE", help="grant what a CSV says: member, amount, reason (-: stdin)"
    )
    giving.add_argument(
        "--dry-run", action="store_true", help="with --file: say line by line what would happen"
    )
    giving.add_argument(
        "--again", action="store_true", help="with --file: also what was granted before"
    )
    back = add("refund", refund, "Give back what a lease cost, or a part: its GPU was sick, say.")
    back.add_argument("lease", metavar="LEASE", help="the lease's id")
    back.add_argument(
        "--amount", type=amount_of, metavar="AMOUNT", help="credits (default: all that is left)"
    )
    back.add_argument("--key", metavar="TEXT", help=_ONCE)
    undo = add("reverse", reverse, "Undo a transfer of the ledger by its opposite, once.")
    undo.add_argument("transfer", metavar="TRANSFER", help="its id, or its first letters")
    for command in (back, undo):
        command.add_argument("--reason", type=_words, required=True, metavar="TEXT", help="why")
    paying = add("payer", payer, "Say which account pays for a member who does not choose one.")
    paying.add_argument("member", metavar="MEMBER", help="the member's name")
    paying.add_argument("account", metavar="ACCOUNT", help="group:NAME, or the member's own name")


def give(arguments: argparse.Namespace, settings: Settings) -> int:
    """Give credits to one account, or what a file says."""
    if arguments.file is not None:
        return _give_file(arguments, settings)
    if arguments.dry_run or arguments.again:
        raise ConfigError("--dry-run and --again are for --file FILE. Nothing was changed.")
    for name in ("account", "amount", "reason"):
        if getattr(arguments, name) is None:
            what = "--reason TEXT" if name == "reason" else name.upper()
            raise ConfigError(
                f"{what} is missing: gpuspawner grant ACCOUNT AMOUNT --reason TEXT, or "
                "gpuspawner grant --file FILE. Nothing was changed."
            )
    return grant(arguments, settings)


def refund(arguments: argparse.Namespace, settings: Settings) -> int:
    """Give back what a lease cost, or a part of it."""
    broker = settings.open_broker()
    try:
        lease = broker.lease(arguments.lease)
    except UnknownLease as error:
        raise UnknownLease(f"{error.message}: gpuspawner leases --all lists them.") from None
    # Whose key it is: a page's or a script's own are others.
    key = f"cli:{arguments.key}" if arguments.key else ""
    after = broker.refund(
        lease.id, arguments.amount, actor=actor(), reason=arguments.reason, key=key
    )
    account = broker.account(lease.account)
    back = after.refunded - lease.refunded
    value = {
        "lease": lease.id,
        "account": lease.account,
        "refunded": exact(back),
        "left": exact(after.charged),
        "balance": exact(account.balance),
    }
    text = (
        f"Gave {credits(back)} credits back to {lease.account} for lease {lease.id} of "
        f"{lease.server}. It cost {credits(after.charged)} now, and the balance is "
        f"{credits(account.balance)} credits."
    )
    if not back:
        text = f"Nothing changed: a refund with the key {arguments.key!r} was made before."
    show(arguments.json, value, text)
    return 0


def reverse(arguments: argparse.Namespace, settings: Settings) -> int:
    """Undo a transfer."""
    broker = settings.open_broker()
    opposite = broker.reverse(arguments.transfer, actor=actor(), reason=arguments.reason)
    moved = {p.account: p.amount for p in opposite.postings if not p.account.startswith("system:")}
    words = [
        f"{credits(abs(amount))} credits {'to' if amount > 0 else 'from'} {name}, whose balance is "
        f"{credits(broker.account(name).balance)} now"
        for name, amount in moved.items()
    ]
    value = {
        "reversal": opposite.id,
        "moved": {name: exact(amount) for name, amount in moved.items()},
    }
    text = f"Reversed: {'; '.join(words)}. The reversal is transfer {opposite.id}."
    show(arguments.json, value, text)
    return 0


def payer(arguments: argparse.Namespace, settings: Settings) -> int:
    """Say which account pays for a member."""
    broker = settings.open_broker()
    member = find_account(broker, member_account(arguments.member))
    name = account_name(arguments.account)
    if name != member.name:
        find_account(broker, name, "Open it with `gpuspawner grant ACCOUNT AMOUNT --open`.")
    broker.keep_payer(arguments.member, name, actor=actor())
    text = f"{name} pays for {arguments.member} from now on, unless they choose another account."
    if name != member.name:
        text += " It does so as long as they are in the group."
    show(arguments.json, {"member": arguments.member, "account": name}, text)
    return 0


def _give_file(arguments: argparse.Namespace, settings: Settings) -> int:
    if arguments.account is not None or arguments.key is not None:
        raise ConfigError(
            "With --file, accounts and amounts come from the file: leave out ACCOUNT, AMOUNT and "
            "--key. Nothing was changed."
        )
    broker = settings.open_broker()
    done = broker.grant_file(
        read_file(arguments.file),
        actor=arguments.actor or default_actor(),
        reason=arguments.reason or "",
        dry_run=arguments.dry_run,
        open_accounts=arguments.open,
        again=arguments.again,
        until=moment(arguments.until, broker.rate_zone),
    )
    show(arguments.json, _plain_transfer(done), _told(done, arguments.dry_run))
    for problem in done.problems:
        note(str(problem))
    if done.problems:
        note("Nothing was granted to anybody.")
    return 1 if done.problems else 0


def _told(done: Bulk, dry_run: bool) -> str:
    headers = ("LINE", "ACCOUNT", "AMOUNT", "BALANCE", "THEN", "REASON")
    rows = [
        (
            str(gift.row.number),
            f"{gift.row.account} (new)" if gift.opened else gift.row.account,
            credits(gift.row.amount),
            credits(gift.before),
            credits(gift.after),
            gift.row.reason,
        )
        for gift in done.gifts
    ]
    verb = "Gave" if done.done else "Would give" if dry_run else "Would have given"
    total = f"{verb} {credits(done.total)} credits to {count(len(rows), 'account')}."
    return f"{table(headers, rows, right=headers[2:5])}\n\n{total}" if rows else total


def _plain_transfer(done: Bulk) -> dict[str, Any]:
    return {
        "done": done.done,
        "total": exact(done.total),
        "lines": [
            {
                "line": gift.row.number,
                "account": gift.row.account,
                "amount": exact(gift.row.amount),
                "before": exact(gift.before),
                "after": exact(gift.after),
                "reason": gift.row.reason,
                "opened": gift.opened,
            }
            for gift in done.gifts
        ],
        "problems": [{"line": p.number or None, "what": p.sentence} for p in done.problems],
    }


def read_file(name: str) -> bytes:
    """The file, or a little more than may be sent at once. Raises InvalidRequest."""
    try:
        if name == "-":
            return sys.stdin.buffer.read(MOST_BYTES + 1)
        with Path(name).open("rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"{name} cannot be read: {error.strerror}.") from None


def _words(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty: say it in words")
    return text.strip()
