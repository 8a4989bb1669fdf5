"""``gpuspawner rates``: prices of GPU time, and admins' changes to them."""

from __future__ import annotations

from typing import Any

from ..cli.command import group
from ..cli.config import Settings
from ..cli.output import actor, count, exact, local, note, price, show, table, utc
from ..cli.parameters import RATE_ID, argument, option, reason_option
from ..devices.models import model_matches
from ..queue.commands import queue_services
from ..services import Services
from .prices import PART_OF_A_GPU, unnamed_instances, words
from .pricing import ANY, Rate


@group()
def rates(settings: Settings) -> None:
    """List every rate that applies now or later."""
    settings.require_configuration("what GPUs cost")
    services = settings.open_services()
    found = services.prices.all_rates()
    headers = ("ID", "CREDITS/H", "MODEL", "ENVIRONMENT", "SLOTS", "HOURS", "FROM", "BY", "REASON")
    rows = [_row(rate) for rate in found.rates]
    text = table(headers, rows, right=("ID", "CREDITS/H", "SLOTS"))
    text += "\n\nA new server pays the first rate that matches; running servers keep theirs."
    card = found.card(services.clock())
    if some := unnamed_instances(card, services.devices.look().devices):
        text += f" {PART_OF_A_GPU}: {', '.join(some)}."
    if change := found.next_change(services.clock()):
        text += f" The next change is at {local(change)}."
    show([plain(rate) for rate in found.rates], text)


rates.add_same("list", "List the rates: those that admins set, then the configuration's.")


@rates.command("set")
@argument("model", "MODEL", "words of the model's name, or '*' for every model")
@argument("rate", "RATE", "credits per GPU-hour, such as 2.5")
@option("--environment", "NAME", "only in this environment (default: all)", default=ANY)
@option("--slots", "N", "the rate is for one of N slots of a shared device", type=int)
@option(
    "--hours",
    "TEXT",
    "only for servers that start in these hours: 'Mon-Fri 20-8, Sat, Sun'",
    default="",
)
@option(
    "--from",
    "DATE",
    "only for servers that start from this date on (default: now)",
    "since",
    default="",
)
@option("--zone", "NAME", "time zone of --hours and --from (default: c.GPURates.zone)", default="")
@reason_option
def set_rate(
    settings: Settings,
    model: str,
    rate: str,
    environment: str,
    slots: int | None,
    hours: str,
    since: str,
    zone: str,
    reason: str,
) -> None:
    """Set the rate of new servers; running servers keep theirs."""
    services = queue_services(settings)
    new = services.prices.set_rate(
        rate,
        model=model,
        environment=environment,
        slots=slots,
        hours=hours,
        zone=zone,
        since=since,
        actor=actor(),
        reason=reason,
    )
    show(plain(new), f"Rate {new.id} is set: {words(new, zone or services.settings.rates.zone)}.")
    _warn(services, new)


@rates.command("remove")
@argument("rate_id", "ID", "the rate's ID in the list", type=RATE_ID)
@reason_option
def remove_rate(settings: Settings, rate_id: int, reason: str) -> None:
    """Remove a rate that an admin set."""
    services = queue_services(settings)
    rate = services.prices.remove_rate(rate_id, actor=actor(), reason=reason)
    text = f"Rate {rate.id} is removed: {words(rate, services.settings.rates.zone)}."
    show(plain(rate), text)


def plain(rate: Rate) -> dict[str, Any]:
    """Return a rate as plain values, for scripts."""
    return {
        "id": rate.id,
        "rate": exact(rate.amount),
        "model": rate.model,
        "environment": rate.environment,
        "slots": rate.slots,
        "hours": rate.hours.text if rate.hours else None,
        "zone": rate.hours.zone if rate.hours else None,
        "from": utc(rate.since),
        "source": "configuration" if rate.id is None else "admin",
        "set_at": utc(rate.set_at),
        "actor": rate.actor,
        "reason": rate.reason,
    }


def _row(rate: Rate) -> tuple[str, ...]:
    hours = f"{rate.hours.text} ({rate.hours.zone})" if rate.hours else "always"
    return (
        str(rate.id or "-"),
        price(rate.amount),
        rate.model,
        rate.environment,
        str(rate.slots or "-"),
        hours,
        local(rate.since),
        rate.actor or "configuration",
        rate.reason,
    )


def _warn(services: Services, rate: Rate) -> None:
    """Print a note if the rate has no effect at present."""
    models = {device.model for device in services.devices.look().devices}
    if rate.model != ANY and not any(model_matches(rate.model, model) for model in models):
        have = ", ".join(sorted(models)) or "none yet"
        note(f"No device of this hub is a {rate.model} (there are: {have}).")
    rest = [each for each in services.prices.all_rates().rates if each.id != rate.id]
    held = [x for x in rest if x.particular > rate.particular and _covers(x, rate)]
    if held:
        more = f" and {count(len(held) - 1, 'other')}" if len(held) > 1 else ""
        note(f"A more specific rate applies where both match: {held[0].id}{more}.")


def _covers(one: Rate, other: Rate) -> bool:
    """Return True if both rates can match the same server."""
    environments = {one.environment, other.environment}
    same_place = len(environments) == 1 or ANY in environments
    one_model, other_model = one.model, other.model
    return same_place and (
        ANY in (one_model, other_model)
        or model_matches(one_model, other_model)
        or model_matches(other_model, one_model)
    )
