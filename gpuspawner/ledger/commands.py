"""The commands that grant, refund and reverse credits, and that show accounts."""

from __future__ import annotations

from typing import Any

from ..cli.command import command
from ..cli.config import Settings
from ..cli.output import (
    actor,
    count,
    credits,
    default_actor,
    exact,
    local,
    note,
    read_input,
    show,
    table,
    utc,
)
from ..cli.parameters import (
    ACCOUNT,
    CREDITS,
    WORDS,
    argument,
    flag,
    limit_option,
    moment,
    option,
    required_reason_option,
)
from ..core.errors import ConfigError, UnknownAccount, UnknownLease
from ..core.units import round_credits
from ..services import Services
from .grant_files import MOST_BYTES
from .grants import BulkGrantResult, meant
from .models import Account, member_account
from .reports import StatementEntry

REMEDIES = {
    "open": "--open opens it.",
    "again": "--again repeats them.",
    "reason": "--reason is for lines without one.",
}
"""The option of ``grant`` that allows what a line of a file asks for."""

key_option = option(
    "--key", "TEXT", "do this only once, even if the command is repeated with this key"
)


@command()
@argument(
    "name",
    "[ACCOUNT]",
    "a member's name, or member:NAME or group:NAME",
    type=ACCOUNT,
    required=False,
)
@argument("amount", "[AMOUNT]", "credits, such as 12.5", type=CREDITS, required=False)
@option("--reason", "TEXT", "the reason, shown in the statement", type=WORDS)
@option(
    "--actor",
    "NAME",
    "who grants the credits (default: the user who runs this command)",
    "giver",
    type=WORDS,
)
@flag("--open", "open accounts that do not exist yet", "opens")
@key_option
@option("--until", "DATE", "take back what is left on this date, such as 2027-07-01")
@option("--file", "FILE", "grant what a CSV file lists: member, amount, reason (-: stdin)")
@flag("--dry-run", "with --file: show line by line what would happen, and grant nothing")
@flag("--again", "with --file: grant even if the same lines were granted before")
def grant(
    settings: Settings,
    name: str | None,
    amount: int | None,
    reason: str | None,
    giver: str | None,
    opens: bool,
    key: str | None,
    until: str | None,
    file: str | None,
    dry_run: bool,
    again: bool,
) -> int:
    """Grant credits to one account, or to the accounts in a file."""
    giver = giver or default_actor()
    if file is not None:
        if name is not None or key is not None:
            raise ConfigError(
                "With --file, accounts and amounts come from the file: leave out ACCOUNT, AMOUNT "
                "and --key. Nothing was changed."
            )
        services = settings.open_services()
        done = services.bulk_grants.grant_file(
            read_input(file, MOST_BYTES),
            actor=giver,
            reason=reason or "",
            dry_run=dry_run,
            open_accounts=opens,
            again=again,
            until=moment(until, services.settings.rates.zone),
        )
        return _show_file(done, dry_run)
    if dry_run or again:
        raise ConfigError("--dry-run and --again are for --file FILE. Nothing was changed.")
    if name is None or amount is None or reason is None:
        what = "ACCOUNT" if name is None else "AMOUNT" if amount is None else "--reason TEXT"
        raise ConfigError(
            f"{what} is missing: gpuspawner grant ACCOUNT AMOUNT --reason TEXT, or "
            "gpuspawner grant --file FILE. Nothing was changed."
        )
    services = settings.open_services()
    if opens:
        _open(services, name, giver)
    before = find_account(services, name, "Open it now with --open.")
    is_new = services.ledger.grant(
        name,
        amount,
        actor=giver,
        reason=reason,
        key=f"grant:{key}" if key else "",
        until=moment(until, services.settings.rates.zone),
    )
    account = find_account(services, name)
    verb, way = ("Gave", "to") if amount > 0 else ("Took", "from")
    text = f"{verb} {credits(abs(amount))} credits {way} {name}"
    if not is_new:
        text = f"Nothing changed: a grant with the key {key!r} was made before"
    text += f". The balance is {credits(account.balance)} credits"
    text += f" (was {credits(before.balance)})." if is_new else "."
    show({"granted": is_new, "amount": exact(amount), **_plain_account(account)}, text)
    return 0


@command()
@argument("name", "MEMBER", "a member's name, or member:NAME or group:NAME", type=ACCOUNT)
@limit_option
def statement(settings: Settings, name: str, limit: int) -> None:
    """Show the balance and the lines of an account, newest first."""
    services = settings.open_services()
    account = find_account(services, name)
    lines, ending = services.ledger.statement(name, limit), services.ledger.lots_of(name)
    folded = services.reports.folded_page(name, services.clock(), limit=limit)
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
            line.transfer[:8] or "-",
            line.reason,
        )
        for line in folded.entries
    ]
    parts = [_sentence(account)]
    parts += [
        f"{credits(left)} of them end at {local(lot.ends_at)}." for lot, left in ending if left
    ]
    if rows:
        parts += ["", table(headers, rows, right=("AMOUNT", "BALANCE"))]
    if folded.older is not None:
        parts += ["", f"These are the newest {count(len(rows), 'line')}; --limit shows more."]
    show(value, "\n".join(parts))


@command()
def accounts(settings: Settings) -> None:
    """List every member's and group's account."""
    services = settings.open_services()
    found = services.ledger.less_due(services.ledger.accounts())
    headers = ("ACCOUNT", "BALANCE", "HELD", "AVAILABLE")
    rows = [(a.name, credits(a.balance), credits(a.held), credits(a.available)) for a in found]
    text = table(headers, rows, right=headers[1:])
    text += f"\n\n{count(len(found), 'account')}"
    if not found:
        text = "No accounts yet: a member's opens at their first sign-in."
    show([_plain_account(account) for account in found], text)


def find_account(services: Services, name: str, advice: str = "") -> Account:
    """Return the account less what is due now, or raise UnknownAccount with the closest names."""
    try:
        return services.ledger.current_account(name)
    except UnknownAccount:
        question = meant(name, (account.name for account in services.ledger.accounts()))
        opens = " A member's account opens at their first sign-in." if "member:" in name else ""
        hint = f" {advice}" if advice else ""
        sentence = f"There is no account {name!r}.{question}{opens}{hint}"
        raise UnknownAccount(sentence, account=name) from None


def _open(services: Services, name: str, actor: str) -> None:
    kind, _, owner = name.partition(":")
    known = {account.name for account in services.ledger.accounts()}
    if name in known:
        return
    if kind == "member":
        opened = services.ledger.open_account(owner)
        note(f"Opened {name} with its opening grant of {credits(opened.balance)} credits.")
        return
    services.ledger.open_group_account(owner, actor=actor)
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


def _plain_line(line: StatementEntry) -> dict[str, Any]:
    return {
        "at": utc(line.at),
        "kind": line.kind,
        "amount": exact(line.amount),
        "balance": exact(line.balance),
        "actor": line.actor,
        "reason": line.reason,
        "lease": line.lease_id,
        "transfer": line.transfer,
    }


@command()
@argument("lease_id", "LEASE", "the lease's full id")
@option(
    "--amount", "AMOUNT", "credits to refund (default: all that is not refunded yet)", type=CREDITS
)
@key_option
@required_reason_option
def refund(
    settings: Settings, lease_id: str, amount: int | None, key: str | None, reason: str
) -> None:
    """Refund what a lease cost, or a part of it."""
    services = settings.open_services()
    try:
        lease = services.leases.get(lease_id)
    except UnknownLease as error:
        raise UnknownLease(f"{error.message}: gpuspawner leases --all lists them.") from None
    # The prefix separates it from the keys of pages and scripts.
    own_key = f"cli:{key}" if key else ""
    after = services.ledger.refund(lease.id, amount, actor=actor(), reason=reason, key=own_key)
    account = find_account(services, lease.account)
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
        text = f"Nothing changed: a refund with the key {key!r} was made before."
    show(value, text)


@command()
@argument("transfer", "TRANSFER", "the transfer's id, or a unique prefix of it")
@required_reason_option
def reverse(settings: Settings, transfer: str, reason: str) -> None:
    """Reverse a transfer."""
    services = settings.open_services()
    opposite = services.ledger.reverse(transfer, actor=actor(), reason=reason)
    moved = {p.account: p.amount for p in opposite.postings if not p.account.startswith("system:")}
    words = [
        f"{credits(abs(amount))} credits {'to' if amount > 0 else 'from'} {name}, whose balance is "
        f"{credits(find_account(services, name).balance)} now"
        for name, amount in moved.items()
    ]
    value = {
        "reversal": opposite.id,
        "moved": {name: exact(amount) for name, amount in moved.items()},
    }
    text = f"Reversed: {'; '.join(words)}. The reversal is transfer {opposite.id}."
    show(value, text)


@command()
@argument("member_name", "MEMBER", "the member's name")
@argument("name", "ACCOUNT", "group:NAME, or the member's own name", type=ACCOUNT)
def payer(settings: Settings, member_name: str, name: str) -> None:
    """Set which account pays for a member."""
    services = settings.open_services()
    member = find_account(services, member_account(member_name))
    if name != member.name:
        find_account(services, name, "Open it with `gpuspawner grant ACCOUNT AMOUNT --open`.")
    services.ledger.keep_payer(member_name, name, actor=actor())
    text = f"{name} pays for {member_name} from now on, unless they choose another account."
    if name != member.name:
        text += " It does so as long as they are in the group."
    show({"member": member_name, "account": name}, text)


def _show_file(done: BulkGrantResult, dry_run: bool) -> int:
    """Print what a file granted, or would grant; return the exit status."""
    show(_plain_transfer(done), _told(done, dry_run))
    for problem in done.problems:
        note(" ".join(filter(None, (str(problem), REMEDIES.get(problem.remedy)))))
    if done.problems:
        note("Nothing was granted.")
    return 1 if done.problems else 0


def _told(done: BulkGrantResult, dry_run: bool) -> str:
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
    shown = sum(round_credits(gift.row.amount) for gift in done.gifts)
    total = f"{verb} {credits(shown)} credits to {count(len(rows), 'account')}."
    return f"{table(headers, rows, right=headers[2:5])}\n\n{total}" if rows else total


def _plain_transfer(done: BulkGrantResult) -> dict[str, Any]:
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
