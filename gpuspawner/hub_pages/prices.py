"""Prices as pages show them, by model and environment and for each choice. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from typing import NamedTuple

from ..catalog.models import Environment
from ..core.times import deadline
from ..core.units import format_credits
from ..devices.models import model_matches
from ..devices.placement import format_memory
from ..devices.snapshots import ModelCount, Overview
from ..ledger.lots import lasts
from ..ledger.models import Account
from ..ledger.rules import format_time_left

MOST_CHOICES = 4000
"""Maximum number of sentences on a page. With more choices, it only has the price table."""

MOST_NAMES = 4
"""Maximum number of environments named in one line of the table."""

FREE = "free of charge"

WITHOUT = f"Without a GPU: {FREE}."

NAME = "{name}"
"""Stands for the environment's name in a sentence."""


@dataclass(frozen=True, slots=True)
class PriceLine:
    """The price of a device of one model, in all or some environments."""

    label: str
    free: int
    total: int
    where: str
    """The environments, if their prices differ; else empty."""
    rate: int
    """Microcredits per GPU-hour."""
    lasts: str
    """How long the balance pays for one device; empty if forever."""

    @property
    def price(self) -> str:
        """The rate in credits, formatted."""
        return format_credits(self.rate)


class Tables(NamedTuple):
    """A sentence for each choice of the form. Environments with equal terms share a table."""

    of: dict[str, int]
    """The index of an environment's table in ``tables``, by slug."""
    tables: tuple[dict[str, str], ...]
    """Sentences by the form's ``gpus|model|account`` or ``gpus|model``, with ``{name}`` for the
    environment's name. ``gpus`` is empty for the environment's default, ``model`` for any."""

    @classmethod
    def shared(
        cls, alike: Sequence[Sequence[Environment]], tables: Iterable[dict[str, str]]
    ) -> Tables:
        """Return the tables, one for each list of environments with equal terms."""
        of = {environment.slug: at for at, some in enumerate(alike) for environment in some}
        return cls(of, tuple(tables))

    def sentence(self, environment: Environment, choice: str) -> str:
        """Return the sentence for one choice; empty if there is none."""
        number = self.of.get(environment.slug)
        found = "" if number is None else self.tables[number].get(choice, "")
        return found.replace(NAME, environment.display_name)


class PriceList:
    """The prices at one moment, for the form of one member."""

    def __init__(
        self,
        overview: Overview,
        environments: Sequence[Environment],
        now: datetime,
        ending: Mapping[str, Sequence[tuple[datetime, int]]] | None = None,
    ) -> None:
        """``ending``: when credits expire and how many (in microcredits), by account name."""
        self.overview = overview
        self._ending = ending or {}
        self.environments = [e for e in environments if not e.cpu_only]
        self.now = now
        self._cards = {e.slug: overview.rates.card(now, e.slug) for e in self.environments}
        self._slots = {view.device.model: view.device.slots for view in overview.devices}

    def rate(self, environment: Environment, count: ModelCount) -> int:
        """Return the microcredits per hour for one device, or one slot of a shared device."""
        slots = self._slots.get(count.model, 1)
        return self._cards[environment.slug].rate_of(count.model, slots)

    def lines(self, account: Account) -> list[PriceLine]:
        """Return a line for each model, or for each of its prices if environments differ."""
        found = []
        for count in self.overview.models:
            by_rate: dict[int, list[str]] = {}
            for environment in self.environments:
                if count in self._models_of(environment):
                    rate = self.rate(environment, count)
                    by_rate.setdefault(rate, []).append(environment.display_name)
            label, free, total = model_label(count), count.free, count.total
            for rate, names in by_rate.items() or {count.rate: [""]}.items():
                where = _join(names) if len(by_rate) > 1 else ""
                found.append(PriceLine(label, free, total, where, rate, self._lasts(account, rate)))
        return found

    def until(self) -> str:
        """Return when these prices change for new servers, formatted; empty if they do not."""
        change = self.overview.rates.next_change(self.now)
        return deadline(change, self.now) if change else ""

    def of(self, environment: Environment) -> str:
        """Return the price of a device in an environment; empty if no device fits.

        It reads ``1.00 to 4.00 credits a GPU-hour``, or ``free of charge``.
        """
        if environment.cpu_only:
            return FREE
        rates = sorted({self.rate(environment, count) for count in self._models_of(environment)})
        if not rates:
            return ""
        return f"{_span(rates)} credits a GPU-hour" if rates[-1] else FREE

    def tables(self, counts: Sequence[int], payers: Sequence[tuple[str, Account]]) -> Tables:
        """Return a sentence on the price of each choice of the form.

        ``payers`` are the accounts to choose from, each with its value in the form.
        """
        gpus = ["", *(str(count) for count in counts)]
        models = ["", *(count.model for count in self.overview.models)]
        alike = group_alike(self.environments, self._terms)
        if len(alike) * len(gpus) * len(models) * len(payers) > MOST_CHOICES:
            return Tables({}, ())
        tables = (
            {
                f"{number}|{model}|{payer}": self._sentence(some[0], number, model, account)
                for number, model, (payer, account) in product(gpus, models, payers)
            }
            for some in alike
        )
        return Tables.shared(alike, tables)

    def _terms(self, environment: Environment) -> Hashable:
        return (
            environment.devices,
            environment.cpu_variant,
            *((c.model, self.rate(environment, c)) for c in self._models_of(environment)),
        )

    def _sentence(self, environment: Environment, number: str, model: str, account: Account) -> str:
        gpus = int(number) if number else environment.devices.default
        if not gpus:
            return WITHOUT if environment.cpu_variant else f"{NAME} needs a GPU."
        most = environment.devices.max
        if gpus > most:
            return f"{NAME} allows {most} GPU{'s' if most > 1 else ''}."
        fitting = [c for c in self._models_of(environment) if model in ("", c.model)]
        rates = sorted({gpus * self.rate(environment, count) for count in fitting})
        if not rates:
            return f"{NAME} does not run on that model."
        what = f"{gpus} GPU{'s' if gpus > 1 else ''}"
        if not rates[-1]:
            return f"{what}: {FREE}."
        kind, _, name = account.name.partition(":")
        whose = f"The balance of the group {name}" if kind == "group" else "Your balance"
        left = self._lasts(account, rates[-1])
        return f"{what}: {_span(rates)} credits an hour. {whose} lasts {left}."

    def _lasts(self, account: Account, rate: int) -> str:
        """Return how long an account can pay a rate, without credits that expire before use."""
        ending = [(end - self.now, left) for end, left in self._ending.get(account.name, ())]
        left = lasts(ending, account.available, rate)
        return format_time_left(left) if left is not None else ""

    def _models_of(self, environment: Environment) -> list[ModelCount]:
        return [
            count
            for count in self.overview.models
            if count.memory_bytes >= environment.min_memory
            and (
                not environment.models
                or any(model_matches(model, count.model) for model in environment.models)
            )
        ]


def group_alike(
    environments: Iterable[Environment], terms: Callable[[Environment], Hashable]
) -> list[list[Environment]]:
    """Return the environments in lists of those with equal terms."""
    found: dict[Hashable, list[Environment]] = {}
    for environment in environments:
        found.setdefault(terms(environment), []).append(environment)
    return list(found.values())


def model_label(count: ModelCount) -> str:
    """Return a model's name with its memory, unless the name has it (A100-SXM4-80GB)."""
    memory = format_memory(count.memory_bytes)
    said = memory.replace(" ", "") in count.model.replace(" ", "")
    return count.model if said else f"{count.model}, {memory}"


def _span(rates: Sequence[int]) -> str:
    """Format sorted rates as ``4.00`` or ``1.00 to 4.00``."""
    least, most = format_credits(rates[0]), format_credits(rates[-1])
    return least if least == most else f"{least} to {most}"


def _join(names: Sequence[str]) -> str:
    if len(names) > MOST_NAMES:
        names = [*names[: MOST_NAMES - 1], f"{len(names) - MOST_NAMES + 1} others"]
    return f"in {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f"in {names[0]}"
