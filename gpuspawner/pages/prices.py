"""What the form says of prices: by model and environment, and of each choice. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import product

from ..broker.view import ModelCount, Overview, clock
from ..catalog import Environment
from ..ledger.rules import format_time_left, time_left
from ..model import Account, format_credits, model_matches
from ..pool import format_memory

MOST_CHOICES = 4000
"""Sentences of single choices in one page; with more, the table has to do."""


@dataclass(frozen=True, slots=True)
class PriceLine:
    """What a device of one model costs, in some environments."""

    label: str
    free: int
    total: int
    where: str
    """The environments, when not all cost the same; else empty."""
    rate: int
    """Microcredits per GPU-hour."""
    lasts: str
    """For how long the balance pays for one device; empty is for ever."""

    @property
    def price(self) -> str:
        """Credits, for people."""
        return format_credits(self.rate)


class Prices:
    """The prices of one moment for one member's form."""

    def __init__(
        self, overview: Overview, environments: Sequence[Environment], now: datetime
    ) -> None:
        self.overview = overview
        self.environments = [e for e in environments if not e.cpu_only]
        self.now = now
        self._cards = {e.slug: overview.rates.card(now, e.slug) for e in self.environments}
        self._slots = {view.device.model: view.device.slots for view in overview.devices}

    def rate(self, environment: Environment, count: ModelCount) -> int:
        """Microcredits per hour of one device of a model in an environment."""
        slots = self._slots.get(count.model, 1)
        return self._cards[environment.slug].rate_of(count.model, slots)

    def lines(self, available: int) -> list[PriceLine]:
        """A line for each model, and for each of its prices where environments differ."""
        found = []
        for count in self.overview.models:
            by_rate: dict[int, list[str]] = {}
            for environment in self._that_run_on(count):
                rate = self.rate(environment, count)
                by_rate.setdefault(rate, []).append(environment.display_name)
            for rate, names in by_rate.items() or {count.rate: [""]}.items():
                where = _join(names) if len(by_rate) > 1 else ""
                lasts = _lasts(available, rate)
                found.append(
                    PriceLine(model_label(count), count.free, count.total, where, rate, lasts)
                )
        return found

    def until(self) -> str:
        """When these prices change for new servers, as people read it; empty when they do not."""
        change = self.overview.rates.next_change(self.now)
        if change is None:
            return ""
        return (
            f"{clock(change.replace(second=0, microsecond=0), self.now)} ({change.astimezone():%Z})"
        )

    def choices(
        self, counts: Sequence[int], payers: Sequence[tuple[str, Account]]
    ) -> dict[str, str]:
        """A sentence for each choice, by ``environment|gpus|model|account`` as the form has them.

        ``gpus`` is empty for what is usual in the environment, ``model`` for any. ``payers`` are
        the accounts that can be chosen, with what the form calls each.
        """
        gpus = ["", *(str(count) for count in counts)]
        models = ["", *(count.model for count in self.overview.models)]
        if len(self.environments) * len(gpus) * len(models) * len(payers) > MOST_CHOICES:
            return {}
        return {
            f"{environment.slug}|{number}|{model}|{payer}": self._sentence(
                environment, number, model, account
            )
            for environment, number, model, (payer, account) in product(
                self.environments, gpus, models, payers
            )
        }

    def _sentence(self, environment: Environment, number: str, model: str, account: Account) -> str:
        gpus = int(number) if number else environment.devices.default
        if not gpus:
            return "Without a GPU: free of charge."
        most = environment.devices.max
        if gpus > most:
            return f"{environment.display_name} allows {most} GPU{'s' if most > 1 else ''}."
        fitting = [c for c in self._models_of(environment) if model in ("", c.model)]
        rates = sorted({gpus * self.rate(environment, count) for count in fitting})
        if not rates:
            return f"{environment.display_name} does not run on that model."
        what = f"{gpus} GPU{'s' if gpus > 1 else ''}"
        if not rates[-1]:
            return f"{what}: free of charge."
        price, dearest = format_credits(rates[0]), format_credits(rates[-1])
        if price != dearest:
            price += f" to {dearest}"
        lasts = _lasts(account.available, rates[-1])
        return f"{what}: {price} credits an hour. {_whose(account)} lasts {lasts}."

    def _that_run_on(self, count: ModelCount) -> list[Environment]:
        return [e for e in self.environments if count in self._models_of(e)]

    def _models_of(self, environment: Environment) -> list[ModelCount]:
        """The devices that an environment may get."""
        return [
            count
            for count in self.overview.models
            if count.memory_bytes >= environment.min_memory
            and (
                not environment.models
                or any(model_matches(model, count.model) for model in environment.models)
            )
        ]


def model_label(count: ModelCount) -> str:
    """A model with its memory, unless its name says that already (A100-SXM4-80GB)."""
    memory = format_memory(count.memory_bytes)
    said = memory.replace(" ", "") in count.model.replace(" ", "")
    return count.model if said else f"{count.model}, {memory}"


def _whose(account: Account) -> str:
    kind, _, name = account.name.partition(":")
    return f"The balance of the group {name}" if kind == "group" else "Your balance"


def _lasts(available: int, rate: int) -> str:
    left = time_left(available, rate)
    return format_time_left(left) if left is not None else ""


def _join(names: Sequence[str]) -> str:
    return f"in {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f"in {names[0]}"
