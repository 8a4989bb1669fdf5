"""``gpuspawner refills``: recurring grants of credits."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ..cli.command import group
from ..cli.config import Settings
from ..cli.output import actor, count, credits, exact, local, note, show, table, utc
from ..cli.parameters import CREDITS, DAYS, argument, flag, moment, option, reason_option
from ..services import Services
from .refills import EVERYBODY, Mode, Refill

refill_argument = argument("refill_id", "ID", "the refill's id, or a unique prefix of it")


@group()
def refills(settings: Settings) -> None:
    """List the refills."""
    found = settings.open_services().refills.all_refills()
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
    show([plain(refill) for refill in found], text)


refills.add_same("list", "List the refills and the next date of each.")


@refills.command("add")
@argument("rule", "RULE", "a recurrence rule, such as 'FREQ=WEEKLY;BYDAY=MO;BYHOUR=6'")
@argument("amount", "AMOUNT", "credits, such as 12.5", type=CREDITS)
@option(
    "--for",
    "WHO",
    f"who gets it: {EVERYBODY} (the default), members:GROUP (each member of the group), "
    "member:NAME or group:NAME (the account of the group); can be repeated",
    "audience",
    multiple=True,
)
@flag("--top-up", "fill balances up to the amount instead of adding it")
@option("--cap", "AMOUNT", "raise no balance above this many credits", type=CREDITS)
@option("--keep-days", "N", "take back what is left after N days", "keep", type=DAYS)
@option("--from", "DATE", "grant nothing before this date (default: now)", "since")
@option(
    "--zone", "NAME", "time zone of the rule and of --from (default: c.GPURates.zone)", default=""
)
@flag("--dry-run", "show what would happen, and create nothing")
@option("--reason", "TEXT", "the reason, shown in the statement", required=True)
def add_refill(
    settings: Settings,
    rule: str,
    amount: int,
    audience: Sequence[str],
    top_up: bool,
    cap: int | None,
    keep: timedelta | None,
    since: str | None,
    zone: str,
    dry_run: bool,
    reason: str,
) -> None:
    """Grant credits regularly, by a recurrence rule (RFC 5545)."""
    services = settings.open_services()
    zone = zone or services.settings.rates.zone
    refill = services.refills.plan_refill(
        rule,
        amount=amount,
        audience=audience or [EVERYBODY],
        actor=actor(),
        reason=reason,
        zone=zone,
        starts_at=moment(since, zone),
        mode=Mode.TOP_UP if top_up else Mode.ADD,
        cap=cap,
        keep=keep,
    )
    first = "Nothing was created: this would be refill"
    if not dry_run:
        refill, first = services.refills.add_refill(refill), "Created refill"
    _show(services, refill, f"{first} {refill.id}.")


@refills.command("remove")
@refill_argument
@reason_option
def remove_refill(settings: Settings, refill_id: str, reason: str) -> None:
    """Remove a refill; credits that it granted stay."""
    services = settings.open_services()
    refill = services.refills.refill(refill_id)
    ended = services.refills.end_refill(refill.id, actor=actor(), reason=reason)
    text = f"Refill {ended.id} ({ended.reason}) is ended. Credits already granted stay."
    show(plain(ended), text)


@refills.command()
@refill_argument
def preview(settings: Settings, refill_id: str) -> None:
    """Show when a refill comes, and what the next one would grant."""
    services = settings.open_services()
    refill = services.refills.refill(refill_id)
    _show(services, refill, f"Refill {refill.id}: {refill.reason}")


def plain(refill: Refill) -> dict[str, Any]:
    """Return a refill as plain values, for scripts."""
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


def _show(services: Services, refill: Refill, first: str) -> None:
    """Print a refill with its next occurrences."""
    moments, gifts = services.refills.preview_refill(refill)
    lines = [first, "", "Next occurrences:", *(f"  {local(at)}" for at in moments)]
    if refill.ended_at is not None or not moments:
        lines = [first, "", "It has no more occurrences."]
    if gifts:
        headers = ("ACCOUNT", "BALANCE", "GETS")
        rows = [(a.name, credits(a.balance), credits(gift)) for a, gift in gifts]
        total = f"{credits(sum(g for _, g in gifts))} credits to {count(len(rows), 'account')}"
        lines += ["", "Granted now, it would be:", "", table(headers, rows, right=headers[1:])]
        lines += ["", total]
    value = {
        **plain(refill),
        "comes_at": [utc(at) for at in moments],
        "gifts": [
            {"account": a.name, "balance": exact(a.balance), "amount": exact(gift)}
            for a, gift in gifts
        ],
    }
    show(value, "\n".join(lines))
    for name in refill.groups:
        note(f"Each member of {name} gets it, too. The Hub names them when it is due.")
