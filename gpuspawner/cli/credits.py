"""``gpuspawner grant``, ``statement`` and ``accounts``: credits from a shell."""

from __future__ import annotations

import argparse
import difflib
import getpass
import os
from datetime import datetime
from typing import Any

from ..broker import Broker
from ..errors import InvalidRequest, UnknownAccount
from ..ledger.bulk import MOST
from ..ledger.entries import check_account
from ..ledger.pricing import parse_moment
from ..model import Account, member_account, parse_credits
from ..store.book import Line
from .config import Settings
from .output import count, credits, exact, local, note, show, table, utc


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
    value = {"granted": done, "amount": exact(arguments.amount), **_plain(account)}
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
        **_plain(account),
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
    show(arguments.json, [_plain(account) for account in found], text)
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


def default_actor() -> str:
    """Who types this, also below sudo."""
    if user := os.environ.get("SUDO_USER"):
        return user
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return f"uid {os.getuid()}"


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


def _plain(account: Account) -> dict[str, Any]:
    return {
        "account": account.name,
        "balance": exact(account.balance),
        "held": exact(account.held),
        "available": exact(account.available),
    }


def _plain_line(line: Line) -> dict[str, Any]:
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
