"""Prices of GPU time: the rates of the configuration, and those set by admins."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import sqlalchemy as sa
from traitlets import Dict, Float, List, Unicode
from traitlets.config import LoggingConfigurable

from ..core.errors import ConfigError, InvalidRequest
from ..core.units import format_credits, format_price
from ..db.engine import Store
from ..devices.mig_profiles import names_instances
from ..devices.models import Device
from . import pricing, repository
from .pricing import ANY, Rate, RateCard, Rates, WeekHours, open_zone
from .service import note

QUOTED = timedelta(minutes=10)
"""How long the price that a form showed is guaranteed."""

PART_OF_A_GPU = (
    "A MIG instance that no rate names costs its part of a GPU's rate, in credits an hour"
)
"""Before the list of these."""


class GPURates(LoggingConfigurable):
    """What an hour of a GPU costs."""

    by_model = Dict(
        {"*": 1},
        config=True,
        help="""
        Credits per GPU-hour by device model. If several patterns match, the longest wins; ``*``
        matches every model. A MIG instance costs its part of its GPU's rate, such as 1/7, unless a
        pattern names it, such as ``MIG 1g.5gb``: then that is its price.

        A rate is copied into the lease when it is granted, so a change applies to new servers only.
        Example::

            c.GPURates.by_model = {"*": 1, "A100": 4, "T4": "0.5"}
        """,
    )

    special = List(
        Dict(),
        config=True,
        help="""
        Rates for special cases: in one ``environment``, at certain ``hours`` of the week, ``from``
        a date on, or for one of the ``slots`` of a shared device. Each entry has a ``rate``, and a
        ``model`` if it is not for all models.

        If several rates match, those of ``by_model`` included, the most specific wins: by
        environment first, then by the longest model name, then slots, hours and date. A server
        keeps the rate that it starts with, day and night. Example::

            c.GPURates.special = [
                {"model": "A100", "hours": "Mon-Fri 20-8, Sat, Sun", "rate": 2},
                {"environment": "course", "rate": 0, "from": "2026-10-01"},
                {"model": "A100", "slots": 4, "rate": "1.2"},
            ]
        """,
    )

    preemptible_share = Float(
        0.5,
        min=0.0,
        max=1.0,
        config=True,
        help="""
        What a preemptible run costs, as a share of the price: it only gets GPUs that nobody else
        can use, and yields them within two minutes. Example::

            c.GPURates.preemptible_share = 0.25
        """,
    )

    zone = Unicode(
        "UTC",
        config=True,
        help="""
        The name of the time zone for the hours and dates of rates. Example::

            c.GPURates.zone = "Europe/Vienna"
        """,
    )

    def read(self) -> Rates:
        """Return the rates of the configuration. Raises ConfigError naming a bad one."""
        try:
            open_zone(self.zone)
        except ValueError as error:
            raise ConfigError(what=f"c.GPURates.zone: {error}") from None
        special = pricing.special_rates(self.special, self.zone)
        return Rates.of(special, pricing.rates_by_model(self.by_model))


class PriceService:
    """Knows the prices of GPU time, and changes them for admins."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], datetime],
        settings: GPURates,
        log: logging.Logger,
    ) -> None:
        """Read the configured rates. Raises ConfigError for invalid ones."""
        self.store = store
        self.clock = clock
        self.settings = settings
        self.log = log
        self.configured = settings.read()

    @property
    def rates(self) -> RateCard:
        """The current prices for environments without a rate of their own. Reads the store."""
        return self.all_rates().card(self.clock())

    def preemptible(self, rate: int) -> int:
        """Return what a preemptible run costs in the place of this rate, in microcredits."""
        return math.ceil(rate * Decimal(str(self.settings.preemptible_share)))

    def all_rates(self) -> Rates:
        """Return every rate that applies now or later, from the store and the configuration."""
        return self.store.run(self.rates_in)

    def rates_in(self, connection: sa.Connection) -> Rates:
        """Return the same as :meth:`all_rates`, in the caller's transaction."""
        found = repository.load_rates(connection)
        return Rates.of(found, self.configured.rates) if found else self.configured

    def set_rate(
        self,
        amount: object,
        *,
        model: str = ANY,
        environment: str = ANY,
        slots: int | None = None,
        hours: str = "",
        zone: str = "",
        since: str = "",
        actor: str,
        reason: str = "",
        dry_run: bool = False,
    ) -> Rate:
        """Set a rate for servers that start from ``since`` (empty: now) on.

        All values are as an admin writes them, ``hours`` and ``since`` in ``zone`` (empty: the
        site's). ``dry_run``: only check them. Raises InvalidRequest naming the invalid field.
        """
        now = self.clock()
        zone = _checked("zone", open_zone, zone or self.settings.zone).key
        begins = _checked("from", pricing.parse_moment, since, zone) if since else now
        if begins < now:
            raise InvalidRequest(
                f"The rate cannot start at {_local(begins, zone)}: that is in the past, and "
                "past sessions keep their price. Leave the date out for a rate from now on.",
                field="from",
            )
        rate = Rate(
            amount=_checked("rate", pricing.parse_rate, amount),
            model=_checked("model", pricing.check_model, model),
            environment=_checked("environment", pricing.check_environment, environment),
            slots=_checked("slots", pricing.check_slots, slots),
            hours=_checked("hours", WeekHours.parse, hours, zone) if hours else None,
            since=begins,
            set_at=now,
            actor=actor,
            reason=reason,
        )
        with self.store.read() if dry_run else self.store.write() as connection:
            if same := next(
                (x for x in repository.load_rates(connection) if x.subject == rate.subject), None
            ):
                raise InvalidRequest(
                    f"Rate {same.id} is for the same from the same moment on: "
                    f"{format_credits(same.amount)} credits an hour. Remove it first.",
                    field="from",
                )
            if dry_run:
                return rate
            rate = repository.insert_rate(connection, rate, zone)
            self._note_rate(connection, "set rate", rate, actor, reason, now)
        self.log.info("%s set rate %s: %s", actor, rate.id, words(rate, zone))
        return rate

    def remove_rate(self, rate_id: int, *, actor: str, reason: str = "") -> Rate:
        """Remove an admin's rate for new servers; rates that it replaced do not come back.

        Raises InvalidRequest if there is none with this number.
        """
        now = self.clock()
        with self.store.write() as connection:
            found = repository.load_rates(connection)
            rate = next((each for each in found if each.id == rate_id), None)
            if rate is None:
                raise InvalidRequest(
                    f"There is no rate {rate_id} that an admin set; `gpuspawner rates` lists them. "
                    "Those of the configuration are changed there.",
                    field="id",
                )
            for each in [x for x in found if _takes_the_place(rate, x, now)]:
                repository.remove_rate(connection, each.id or 0, now)
            self._note_rate(connection, "remove rate", rate, actor, reason, now)
        self.log.info("%s removed rate %s", actor, rate.id)
        return rate

    def _note_rate(
        self,
        connection: sa.Connection,
        action: str,
        rate: Rate,
        actor: str,
        reason: str,
        now: datetime,
    ) -> None:
        detail = words(rate, rate.hours.zone if rate.hours else self.settings.zone)
        detail += f": {reason}" if reason else ""
        note(connection, actor, action, f"rate {rate.id}", detail, now)


def unnamed_instances(card: RateCard, devices: Iterable[Device]) -> list[str]:
    """Describe what each kind of MIG instance costs that no rate of the card names.

    Such as ``NVIDIA A100-SXM4-40GB MIG 1g.5gb 0.57 (1/7 of a GPU)``.
    """
    found = []
    for model, part in sorted({(d.model, d.part) for d in devices if d.part != 1}):
        rate = card.find(model)
        if rate is None or not names_instances(rate.model):
            price = format_price(card.rate_of(model, part=part))
            found.append(f"{model} {price} ({part} of a GPU)")
    return found


def priced_at(now: datetime, shown_at: datetime | None) -> tuple[datetime, ...]:
    """Return the times whose prices a start may use; it pays the lowest.

    Now, and the time of the form unless that is too old or in the future.
    """
    if shown_at is None or not now - QUOTED <= shown_at <= now:
        return (now,)
    return (now, shown_at)


def words(rate: Rate, zone: str) -> str:
    """Format a rate for people: ``4.00 credits an hour for A100 in pytorch from ...``."""
    parts = [f"{format_price(rate.amount)} credits an hour for {_what(rate)}"]
    if rate.environment != ANY:
        parts.append(f"in {rate.environment}")
    if rate.hours:
        parts.append(f"at {rate.hours.text} ({rate.hours.zone})")
    if rate.since:
        parts.append(f"from {_local(rate.since, zone)}")
    return " ".join(parts)


def _what(rate: Rate) -> str:
    model = "any model" if rate.model == ANY else rate.model
    return f"one of {rate.slots} slots of {model}" if rate.slots else model


def _local(moment: datetime, zone: str) -> str:
    return f"{moment.astimezone(open_zone(zone)):%Y-%m-%d %H:%M %Z}"


def _takes_the_place(rate: Rate, other: Rate, now: datetime) -> bool:
    """Return True if a rate is the other one, or replaced it for the same subject."""
    if rate.since is None or other.since is None:
        return rate.id == other.id
    same = replace(rate, since=None).subject == replace(other, since=None).subject
    return rate.id == other.id or (same and other.since <= rate.since <= now)


def _checked(field: str, check: Callable[..., Any], *values: object) -> Any:
    """Return the checked value. Raises InvalidRequest naming the field."""
    try:
        return check(*values)
    except ValueError as error:
        raise InvalidRequest(f"The field {field!r} is not valid: {error}", field=field) from None
