"""``gpuspawner rates``: what GPU time costs, and an admin's changes of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ..cli.config import Settings
from ..cli.output import changes_of, count, credits, exact, local, note, show, table, utc
from ..devices.models import model_matches
from ..queue.commands import actor, line_broker
from ..services import Broker
from .prices import words
from .pricing import ANY, Rate


def grammar(command: argparse.ArgumentParser, common: Callable[..., Any]) -> None:
    """``gpuspawner rates`` alone lists, as ``list`` does; ``set`` and ``remove`` change."""
    add = changes_of(command, common)
    add("list", rates, "List the rates: an admin's own first, then the configuration's.")
    setting = add("set", set_rate, "Have new servers pay another rate; those that run keep theirs.")
    setting.add_argument("model", metavar="MODEL", help="words of a model's name; '*' is any")
    setting.add_argument("rate", metavar="RATE", help="credits per GPU-hour, such as 2.5")
    setting.add_argument("--environment", default=ANY, metavar="NAME", help="only in this one")
    setting.add_argument(
        "--slots", type=int, metavar="N", help="for one of N slots of a shared device"
    )
    setting.add_argument(
        "--hours", default="", metavar="TEXT", help="hours of the week: 'Mon-Fri 20-8, Sat, Sun'"
    )
    setting.add_argument(
        "--from", dest="since", default="", metavar="DATE", help="from then on (default: now)"
    )
    setting.add_argument(
        "--zone", default="", metavar="NAME", help="of hours and date (default: c.Broker.rate_zone)"
    )
    removing = add("remove", remove_rate, "Have one of an admin's rates hold no more.")
    removing.add_argument("id", type=_number, metavar="ID", help="its number in the list")
    for changing in (setting, removing):
        changing.add_argument("--reason", default="", metavar="TEXT", help="why")


def rates(arguments: argparse.Namespace, settings: Settings) -> int:
    """List every rate that holds or will."""
    broker = settings.open_broker()
    found = broker.all_rates()
    headers = ("ID", "CREDITS/H", "MODEL", "ENVIRONMENT", "SLOTS", "HOURS", "FROM", "BY", "REASON")
    rows = [_row(rate) for rate in found.rates]
    text = table(headers, rows, right=("ID", "CREDITS/H", "SLOTS"))
    text += "\n\nThe first that fits is what a new server pays; those that run keep their rate."
    if change := found.next_change(broker.clock()):
        text += f" The next change is at {local(change)}."
    show(arguments.json, [plain(rate) for rate in found.rates], text)
    return 0


def set_rate(arguments: argparse.Namespace, settings: Settings) -> int:
    """Set a rate for new servers."""
    broker = line_broker(settings)
    rate = broker.set_rate(
        arguments.rate,
        model=arguments.model,
        environment=arguments.environment,
        slots=arguments.slots,
        hours=arguments.hours,
        zone=arguments.zone,
        since=arguments.since,
        actor=actor(),
        reason=arguments.reason,
    )
    zone = arguments.zone or broker.rate_zone
    show(arguments.json, plain(rate), f"Rate {rate.id} is set: {words(rate, zone)}.")
    _warn(broker, rate)
    return 0


def remove_rate(arguments: argparse.Namespace, settings: Settings) -> int:
    """Remove one of an admin's rates."""
    broker = line_broker(settings)
    rate = broker.remove_rate(arguments.id, actor=actor(), reason=arguments.reason)
    text = f"Rate {rate.id} holds no more: {words(rate, broker.rate_zone)}."
    show(arguments.json, plain(rate), text)
    return 0


def plain(rate: Rate) -> dict[str, Any]:
    """A rate, for scripts."""
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
        credits(rate.amount),
        rate.model,
        rate.environment,
        str(rate.slots or "-"),
        hours,
        local(rate.since),
        rate.actor or "configuration",
        rate.reason,
    )


def _warn(broker: Broker, rate: Rate) -> None:
    """Say what has no effect now, though it may have some day."""
    models = {device.model for device in broker.look().devices}
    if rate.model != ANY and not any(model_matches(rate.model, model) for model in models):
        have = ", ".join(sorted(models)) or "none yet"
        note(f"No device of this hub is a {rate.model} (there are: {have}).")
    rest = [each for each in broker.all_rates().rates if each.id != rate.id]
    held = [x for x in rest if x.particular > rate.particular and _covers(x, rate)]
    if held:
        more = f" and {count(len(held) - 1, 'other')}" if len(held) > 1 else ""
        note(f"Rate {held[0].id}{more} is more particular and goes before it where both fit.")


def _covers(one: Rate, other: Rate) -> bool:
    """Whether two rates can fit the same server."""
    environments = {one.environment, other.environment}
    same_place = len(environments) == 1 or ANY in environments
    one_model, other_model = one.model, other.model
    return same_place and (
        ANY in (one_model, other_model)
        or model_matches(one_model, other_model)
        or model_matches(other_model, one_model)
    )


def _number(text: str) -> int:
    if text.isascii() and text.isdigit() and 0 < int(text[:20]) < 2**63:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of a rate; the list has it under ID")
