"""``gpuspawner refills``: credits that are given again and again."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ..cli.config import Settings
from ..cli.output import changes_of, count, credits, exact, local, note, show, table, utc
from ..queue.commands import actor
from ..services import Broker
from .commands import amount_of, moment
from .refills import EVERYBODY, Mode, Refill


def grammar(command: argparse.ArgumentParser, common: Callable[..., Any]) -> None:
    """``gpuspawner refills`` alone lists, as ``list`` does."""
    add = changes_of(command, common)
    add("list", refills, "List the refills, and when each comes next.")
    making = add("add", add_refill, "Give credits again and again, by a rule of RFC 5545.")
    making.add_argument("rule", metavar="RULE", help="such as 'FREQ=WEEKLY;BYDAY=MO;BYHOUR=6'")
    making.add_argument("amount", type=amount_of, metavar="AMOUNT", help="credits, such as 12.5")
    making.add_argument(
        "--for",
        dest="audience",
        action="append",
        metavar="WHO",
        help=f"{EVERYBODY} (the default), members:GROUP, member:NAME, group:NAME; may be repeated",
    )
    making.add_argument(
        "--top-up", action="store_true", help="fill balances up to the amount, and add no more"
    )
    making.add_argument(
        "--cap", type=amount_of, metavar="AMOUNT", help="bring no balance above this"
    )
    making.add_argument(
        "--keep-days", type=_days, metavar="N", help="take back what is left after so many days"
    )
    making.add_argument("--from", dest="since", metavar="DATE", help="not before (default: now)")
    making.add_argument(
        "--zone", default="", metavar="NAME", help="whose clock (default: c.Broker.rate_zone)"
    )
    making.add_argument("--dry-run", action="store_true", help="only say what would happen")
    making.add_argument("--reason", required=True, metavar="TEXT", help="why, for the statement")
    ending = add("remove", remove_refill, "Give a refill no more; what was given stays.")
    ending.add_argument("--reason", default="", metavar="TEXT", help="why")
    seeing = add("preview", preview, "Say when a refill comes, and what the next would give.")
    for sub in (ending, seeing):
        sub.add_argument("id", metavar="ID", help="the refill's, or its first letters")


def refills(arguments: argparse.Namespace, settings: Settings) -> int:
    """List the refills."""
    found = settings.open_broker().refills()
    headers = ("ID", "NEXT", "WHAT", "AMOUNT", "CAP", "KEPT", "FOR", "RULE", "ZONE", "REASON")
    rows = [
        (
            refill.id,
            local(refill.next_at),
            "add" if refill.mode is Mode.ADD else "top up",
            credits(refill.amount),
            credits(refill.cap) if refill.cap is not None else "-",
            f"{refill.keep.days} d" if refill.keep else "-",
            ", ".join(refill.audience),
            refill.recurrence.rule,
            refill.recurrence.zone,
            refill.reason,
        )
        for refill in found
    ]
    text = table(headers, rows, right=("AMOUNT", "CAP", "KEPT")) if rows else "No refills."
    show(arguments.json, [plain(refill) for refill in found], text)
    return 0


def add_refill(arguments: argparse.Namespace, settings: Settings) -> int:
    """Make a refill, or say what it would be."""
    broker = settings.open_broker()
    zone = arguments.zone or broker.rate_zone
    refill = broker.plan_refill(
        arguments.rule,
        amount=arguments.amount,
        audience=arguments.audience or [EVERYBODY],
        actor=actor(),
        reason=arguments.reason,
        zone=zone,
        starts_at=moment(arguments.since, zone),
        mode=Mode.TOP_UP if arguments.top_up else Mode.ADD,
        cap=arguments.cap,
        keep=None if arguments.keep_days is None else timedelta(days=arguments.keep_days),
    )
    first = "Nothing was made: this would be"
    if not arguments.dry_run:
        refill, first = broker.add_refill(refill), "There is a new refill,"
    return _show(broker, refill, arguments.json, f"{first} {refill.id}.")


def remove_refill(arguments: argparse.Namespace, settings: Settings) -> int:
    """End a refill."""
    broker = settings.open_broker()
    refill = broker.refill(arguments.id)
    ended = broker.end_refill(refill.id, actor=actor(), reason=arguments.reason)
    text = f"Refill {ended.id} ({ended.reason}) is given no more. What it gave stays."
    show(arguments.json, plain(ended), text)
    return 0


def preview(arguments: argparse.Namespace, settings: Settings) -> int:
    """Say when a refill comes, and to whom."""
    broker = settings.open_broker()
    refill = broker.refill(arguments.id)
    return _show(broker, refill, arguments.json, f"Refill {refill.id}: {refill.reason}")


def plain(refill: Refill) -> dict[str, Any]:
    """A refill, for scripts."""
    return {
        "id": refill.id,
        "rule": refill.recurrence.rule,
        "zone": refill.recurrence.zone,
        "from": utc(refill.recurrence.starts_at),
        "mode": refill.mode.value,
        "amount": exact(refill.amount),
        "cap": None if refill.cap is None else exact(refill.cap),
        "keep_days": None if refill.keep is None else refill.keep.days,
        "for": list(refill.audience),
        "reason": refill.reason,
        "made_at": utc(refill.made_at),
        "made_by": refill.made_by,
        "next_at": utc(refill.next_at),
        "ended_at": utc(refill.ended_at),
    }


def _show(broker: Broker, refill: Refill, as_json: bool, first: str) -> int:
    """A refill with what comes of it."""
    moments, gifts = broker.preview_refill(refill)
    lines = [first, "", "It comes at", *(f"  {local(at)}" for at in moments)]
    if refill.ended_at is not None or not moments:
        lines = [first, "", "It comes no more."]
    if gifts:
        headers = ("ACCOUNT", "BALANCE", "GETS")
        rows = [(a.name, credits(a.balance), credits(gift)) for a, gift in gifts]
        lines += ["", "Given now, it would be", "", table(headers, rows, right=headers[1:])]
        lines += [
            "",
            f"{credits(sum(g for _, g in gifts))} credits to {count(len(rows), 'account')}",
        ]
    value = {
        **plain(refill),
        "comes_at": [utc(at) for at in moments],
        "gifts": [
            {"account": a.name, "balance": exact(a.balance), "amount": exact(gift)}
            for a, gift in gifts
        ],
    }
    show(as_json, value, "\n".join(lines))
    for group in refill.groups:
        note(f"Beside these, each member of {group} gets it: who that is, the Hub says then.")
    return 0


def _days(text: str) -> int:
    if text.isascii() and text.isdigit() and 0 < int(text[:9]) < 10_000:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of days: write 30, say")
