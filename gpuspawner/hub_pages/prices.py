"""Prices as pages show them, by model and environment and for each choice. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import product

from ..catalog.models import Environment
from ..core.times import deadline
from ..core.units import format_credits, format_memory, format_price, gigabytes
from ..devices.models import model_matches
from ..devices.reservations import reservation_of
from ..devices.slots import shared_with
from ..devices.snapshots import COUNTED, ModelCount, Overview, ShareCount
from ..ledger.credit_policy import SESSION, AccountRunway, CreditPolicy, planned_end
from ..ledger.lots import lasts
from ..ledger.models import Account
from ..ledger.rules import can_afford, format_time_left, hold_for
from .choice_tables import MOST_CHOICES, MemoryChoice, Tables, choice_key, group_alike

MOST_NAMES = 4
"""Maximum number of environments named in one line of the table."""

FREE = "free of charge"

NAME = "{name}"
"""Stands for the environment's name in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceLine:
    """The price of a device or a share of one model, in all or some environments."""

    label: str
    free: int
    total: int
    rate: int
    """Microcredits per hour."""
    where: str = ""
    """The environments, if their prices differ; else empty."""
    lasts: str = ""
    """How long the balance pays for one device; empty if forever."""
    is_share: bool = False
    """True for a share of a device."""
    reserved: str = ""
    """Which of them are reserved, such as ``2 reserved for vision-lab``."""

    @classmethod
    def of(cls, count: ModelCount | ShareCount, rate: int) -> PriceLine:
        """Return the line for these devices or shares at a rate in microcredits per hour."""
        return cls(
            label=count.label if isinstance(count, ShareCount) else model_label(count),
            free=count.free,
            total=count.total,
            rate=rate,
            is_share=isinstance(count, ShareCount),
            reserved=count.reserved,
        )

    @property
    def price(self) -> str:
        """The rate in credits, formatted."""
        return format_price(self.rate)

    @property
    def availability(self) -> str:
        """How many are free, such as ``1 of 2``, or ``3 of 8 shares``."""
        free = f"{self.free} of {self.total}{' shares' if self.is_share else ''}"
        return free if self.total else "out of service"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What the form shows for one number of GPUs of one model in an environment."""

    what: str = ""
    """Such as ``2 x T4``, ``1/4 of T4, about 4 GB``, or ``1 GPU`` if there are several models;
    empty without a GPU."""
    price: str = FREE
    """Such as ``8.00 credits an hour``."""
    refusal: str = ""
    """Why nobody gets this, with ``{name}`` for the environment's name; else empty."""
    totals: dict[str, str] = field(default_factory=dict)
    """The price of a whole session, by the form's value of hours."""
    lasts: dict[str, tuple[float | None, str]] = field(default_factory=dict)
    """How long each account pays, left out if for ever: in how many hours that ends a session with
    a time limit (None if it never does), and in words."""
    poor: dict[str, str] = field(default_factory=dict)
    """Why an account cannot pay for the start, by the form's value of it."""
    shared: str = ""
    """Of a share, such as ``shared with up to 3 others, not isolated``."""


class PriceList:
    """The prices at one moment, for the form of one member."""

    def __init__(
        self,
        overview: Overview,
        environments: Sequence[Environment],
        now: datetime,
        ending: Mapping[str, Sequence[tuple[datetime, int]]] | None = None,
        running: Mapping[str, int] | None = None,
        policies: Mapping[str, CreditPolicy] | None = None,
        grace: timedelta = timedelta(0),
        discounted: Callable[[int], int] = lambda rate: rate,
        reserved: Mapping[str, str] | None = None,
    ) -> None:
        """``ending``: when credits expire and how many (in microcredits), by account name.

        By the same name: ``running``, microcredits an hour of the servers that run already, and
        ``policies``; ``grace`` is that of a server whose account is dry. ``discounted`` is what
        becomes of the rate of all devices of a start together. ``reserved``: for environments whose
        devices are all reserved for others, what to tell about their usual request, by slug.
        """
        self.overview = overview
        self._ending = ending or {}
        self._running = running or {}
        self._policies = policies or {}
        self._grace = grace
        self._discounted = discounted
        self._reserved = reserved or {}
        self.environments = [e for e in environments if not e.cpu_only]
        self.now = now
        self._cards = {e.slug: overview.rates.card(now, e.slug) for e in self.environments}
        self._shares = overview.shares
        self._known = Counter(
            (
                view.device.model,
                view.device.memory_bytes,
                view.device.part,
                (view.device.slots, reservation_of(view.device)),
            )
            for view in overview.devices
            if view.state in COUNTED
        )

    def rate(self, environment: Environment, count: ModelCount | ShareCount) -> int:
        """Return the microcredits per hour for one device or share."""
        card = self._cards[environment.slug]
        if isinstance(count, ShareCount):
            return card.rate_of(count.model, count.slots, count.part, count.held_slots)
        return card.rate_of(count.model, part=count.part)

    def shares_of(self, environment: Environment) -> list[ShareCount]:
        """Return the smallest shares that a server of an environment may have on this hub."""
        if not environment.has_slots:
            return []
        suitable = (share for share in self._shares if _runs_on(environment, share.model))
        found = (share.with_memory(environment.min_memory) for share in suitable)
        return [share for share in found if share is not None]

    def shares(self) -> dict[ShareCount, list[Environment]]:
        """Return the environments of each smallest share of any, the largest share first."""
        found: dict[ShareCount, list[Environment]] = {}
        for environment in self.environments:
            for share in self.shares_of(environment):
                found.setdefault(share, []).append(environment)
        largest_first = sorted(found, key=lambda s: (-s.share_bytes, s.model, -s.part))
        return {share: found[share] for share in largest_first}

    def smallest_shares(self) -> list[ShareCount]:
        """Return the same without those that are a larger share of the same devices."""
        return list({replace(share, held_slots=1): share for share in self.shares()}.values())

    def of_models(self, environment: Environment) -> list[PriceLine]:
        """Return a line for each model that an environment runs on; none for a CPU-only one."""
        if environment.cpu_only:
            return []
        found: list[ModelCount | ShareCount] = [*self._models_of(environment)]
        found += self.shares_of(environment)
        return [PriceLine.of(each, self.rate(environment, each)) for each in found]

    def lines(self, account: Account) -> list[PriceLine]:
        """Return a line for each model and share, or for each price of it if environments differ.

        Shares come last, and only those that a server of these environments may have.
        """
        found = []
        for count in self.overview.models:
            of = [e for e in self.environments if count in self._models_of(e)]
            line = PriceLine.of(count, count.rate)
            found += self._by_rate(line, account, [(e, self.rate(e, count)) for e in of])
        for share, of in self.shares().items():
            line = PriceLine.of(share, 0)
            found += self._by_rate(line, account, [(e, self.rate(e, share)) for e in of])
        return found

    def _by_rate(
        self, line: PriceLine, account: Account, rates: Iterable[tuple[Environment, int]]
    ) -> list[PriceLine]:
        """Return the line for each rate, with the names of its environments if there are several.

        The line's own rate counts if no environment has one.
        """
        by_rate: dict[int, list[str]] = {}
        for environment, rate in rates:
            by_rate.setdefault(rate, []).append(environment.display_name)
        return [
            replace(
                line,
                where=_join(names) if len(by_rate) > 1 else "",
                rate=rate,
                lasts=self._lasts(account, rate),
            )
            for rate, names in by_rate.items() or {line.rate: [""]}.items()
        ]

    def until(self) -> str:
        """Return when these prices change for new servers, formatted; empty if they do not."""
        change = self.overview.rates.next_change(self.now)
        return deadline(change, self.now) if change else ""

    def of(self, environment: Environment) -> str:
        """Return the price of a device in an environment; empty if no device fits.

        It reads ``1.00 to 4.00 credits a GPU-hour``, ``1.00 credits a GPU-hour, 0.25 for a share``,
        ``0.50 credits an hour`` if some of them are MIG instances, or ``free of charge``.
        """
        if environment.cpu_only:
            return FREE
        models = self._models_of(environment)
        rates = sorted({self.rate(environment, count) for count in models})
        shares = sorted({self.rate(environment, each) for each in self.shares_of(environment)})
        if not rates and not shares:
            return ""
        if not max([*rates, *shares]):
            return FREE
        if not rates:
            return f"{_span(shares)} credits an hour for a share"
        unit = "a GPU-hour" if all(count.part == 1 for count in models) else "an hour"
        return f"{_span(rates)} credits {unit}" + (
            f", {_span(shares)} for a share" if shares else ""
        )

    def most_gpus(self, environment: Environment) -> int:
        """Return the most GPUs that a server of this environment can get on this hub, ever."""
        return min(environment.devices.max, self._most(self._models_of(environment)))

    def model_names(self, environment: Environment) -> list[str]:
        """Return the models that an environment runs on."""
        whole = [count.model for count in self._models_of(environment)]
        shared = [share.model for share in self.shares_of(environment)]
        return list(dict.fromkeys(whole + shared))

    def tables(
        self,
        counts: Sequence[int | str],
        payers: Sequence[tuple[str, Account]],
        hours: Sequence[tuple[str, float]] = (),
        usual_hours: Mapping[str, float | None] | None = None,
        lead: timedelta = timedelta(0),
        by_memory: Mapping[str, Sequence[MemoryChoice]] | None = None,
    ) -> Tables[Offer]:
        """Return what each choice of the form costs, and who could not pay for it.

        ``counts`` are numbers of devices, and :data:`~gpuspawner.leases.models.SHARE`. ``payers``
        are the accounts to choose from and ``hours`` the session lengths, each with its
        value in the form; ``usual_hours`` the lengths if the member chooses none, by slug. An
        account must be able to pay for ``lead`` at the start. With ``by_memory``, the answer is
        about these choices in place of the ``counts``, by slug.
        """
        usual = usual_hours or {}
        alike = group_alike(self.environments, lambda e: (self._terms(e), usual.get(e.slug)))
        choices = [
            self._choices(some[0], counts) if by_memory is None else by_memory[some[0].slug]
            for some in alike
        ]
        if sum(map(len, choices)) * (len(payers) + len(hours)) > MOST_CHOICES:
            return Tables({}, ())
        lengths = dict(hours)

        def offers(environment: Environment, some: Sequence[MemoryChoice]) -> dict[str, Offer]:
            default = usual.get(environment.slug)
            ends = {**lengths, "": default} if default is not None else lengths
            return {
                choice_key(*each): self._offer(environment, each, payers, ends, lead)
                for each in some
            }

        return Tables.shared(
            alike, (offers(e[0], some) for e, some in zip(alike, choices, strict=True))
        )

    def choices_by_memory(
        self, environment: Environment, counts: Sequence[int | str], asked: int | None
    ) -> list[MemoryChoice]:
        """Return the choices of the form with an amount of memory, where it makes a difference.

        These are the sizes in GB between which the devices, or the shares, of a choice differ, and
        ``asked`` if some of them have that much.
        """
        if environment.cpu_only:
            return []
        found = []
        for count, model, _ in self._choices(environment, counts):
            some: Iterable[tuple[str, int]] = ()
            if isinstance(count, str):
                shares = self.shares_of(environment)
                some = ((each.model, each.share_bytes) for s in shares for each in s.up())
            elif count:
                some = ((c.model, c.memory_bytes) for c in self._models_of(environment))
            sizes = {gigabytes(size) for name, size in some if model in ("", name)} - {0}
            if len(sizes) > 1:
                extra = {asked} if asked and asked <= max(sizes) else set()
                found += [(count, model, memory) for memory in sorted(sizes | extra)]
        return found

    def _why_reserved(self, environment: Environment, *, is_share: bool) -> str:
        """Return the sentence about what is reserved, if it is about such a request."""
        is_usual = is_share == (environment.sharing == "slot")
        return self._reserved.get(environment.slug, "") if is_usual else ""

    def _choices(self, environment: Environment, counts: Sequence[int | str]) -> list[MemoryChoice]:
        """Return the numbers of GPUs, with the default even if it is too many, and the models."""
        most = max(self.most_gpus(environment), environment.devices.default)
        models = ["", *self.model_names(environment)]
        some = [c for c in counts if (environment.has_slots if isinstance(c, str) else c <= most)]
        return list(product(some, models, [0]))

    def _terms(self, environment: Environment) -> Hashable:
        return (
            environment.devices,
            environment.cpu_variant,
            environment.sharing,
            self._reserved.get(environment.slug),
            *((c.model, self.rate(environment, c)) for c in self._models_of(environment)),
            *((s.label, self.rate(environment, s)) for s in self.shares_of(environment)),
        )

    def _offer(
        self,
        environment: Environment,
        choice: MemoryChoice,
        payers: Sequence[tuple[str, Account]],
        hours: Mapping[str, float],
        lead: timedelta,
    ) -> Offer:
        gpus, model, memory = choice
        if memory:
            least = max(environment.min_memory, memory * 10**9)
            environment = environment.model_copy(update={"min_memory": least})
        if isinstance(gpus, str):
            shares = [s for s in self.shares_of(environment) if model in ("", s.model)]
            if not shares:
                none = f"No {model or 'GPU'} of this hub has a share for {NAME}."
                return Offer(refusal=self._why_reserved(environment, is_share=True) or none)
            share_rates = {self._discounted(self.rate(environment, s)) for s in shares}
            offer = self._priced(share_choice(shares), sorted(share_rates), payers, hours, lead)
            return replace(offer, shared=most_shared(shares))
        if not gpus:
            return Offer(refusal="" if environment.cpu_variant else f"{NAME} needs a GPU.")
        fitting = [c for c in self._models_of(environment) if model in ("", c.model)]
        if not fitting:
            none = f"{NAME} does not run on a GPU of this hub."
            return Offer(refusal=self._why_reserved(environment, is_share=False) or none)
        there = {c.model: self._most([x for x in fitting if x.model == c.model]) for c in fitting}
        enough = [count for count in fitting if there[count.model] >= gpus]
        if not enough:
            most = max(there.values())
            several = f"at most {most} GPU{'s' if most > 1 else ''} of one model"
            what = f"{most} {model}" if model else several
            what += f" with {memory} GB" if memory else ""
            return Offer(refusal=f"This hub has {what}.")
        what = _what(gpus, {count.model for count in enough})
        rates = sorted({self._discounted(gpus * self.rate(environment, each)) for each in enough})
        return self._priced(what, rates, payers, hours, lead)

    def _priced(
        self,
        what: str,
        rates: Sequence[int],
        payers: Sequence[tuple[str, Account]],
        hours: Mapping[str, float],
        lead: timedelta,
    ) -> Offer:
        """Return the offer of ``what`` at one of these rates of all its devices, sorted."""
        if not rates[-1]:
            return Offer(what=what)
        lasts = {value: self._lasts_with(account, rates[-1]) for value, account in payers}
        return Offer(
            what=what,
            price=f"{_span(rates)} credits an hour",
            totals={
                value: f"{_span([math.ceil(rate * length) for rate in rates])} credits"
                for value, length in hours.items()
            },
            lasts={value: found for value, found in lasts.items() if found is not None},
            poor={
                value: _poor(account)
                for value, account in payers
                if not can_afford(account.available, hold_for(rates[0], lead))
            },
        )

    def _most(self, models: Iterable[ModelCount]) -> int:
        """Return the most devices of these that one server may have, in service or not."""
        sizes = {(count.model, count.memory_bytes, count.part) for count in models}
        together = Counter[object]()
        for (model, memory, part, alike), some in self._known.items():
            if (model, memory, part) in sizes:
                together[model, alike] += some
        return max(together.values(), default=0)

    def _lasts(self, account: Account, rate: int) -> str:
        left = self._left(account, rate)
        return format_time_left(left) if left is not None else ""

    def _left(self, account: Account, rate: int) -> timedelta | None:
        """Return how long an account can pay a rate, without credits that expire before use."""
        return lasts(self._ending_of(account), account.available, rate)

    def _lasts_with(self, account: Account, rate: int) -> tuple[float | None, str] | None:
        """Return how long an account pays for a new server beside those that run already."""
        policy = self._policies.get(account.name, CreditPolicy())
        rate += self._running.get(account.name, 0)
        ending = self._ending_of(account)
        left = lasts(ending, account.balance + policy.overdraft, rate)
        if left is None:
            return None
        purse = AccountRunway(account.balance, rate, tuple(ending))
        end = planned_end(purse, None, self.now, policy, self._grace)
        if end is None or policy.when_dry == SESSION:
            return None, format_time_left(left)
        return round((end.at - self.now) / timedelta(hours=1), 3), format_time_left(left)

    def _ending_of(self, account: Account) -> list[tuple[timedelta, int]]:
        return [(end - self.now, left) for end, left in self._ending.get(account.name, ())]

    def _models_of(self, environment: Environment) -> list[ModelCount]:
        """Return the models that a server of an environment may have whole devices of."""
        if not environment.has_whole_devices:
            return []
        return [
            count
            for count in self.overview.models
            if count.memory_bytes >= environment.min_memory and _runs_on(environment, count.model)
        ]


def share_choice(shares: Sequence[ShareCount]) -> str:
    """Return what a share is: ``1/4 of T4 (about 4 GB)``, or a list of what it may be.

    The list begins with ``a share of a GPU:``. The result is empty if there is no share.
    """
    found = (
        "{} ({})".format(*share.label.rsplit(", ", 1))
        for share in sorted(shares, key=lambda share: share.share_bytes)
    )
    kinds = list(dict.fromkeys(found))
    return f"a share of a GPU: {', or '.join(kinds)}" if len(kinds) > 1 else "".join(kinds)


def most_shared(shares: Iterable[ShareCount]) -> str:
    """Return ``shared with up to 3 others, not isolated``, for the most others of these shares.

    Empty if there is no share.
    """
    others = max((share.slots - share.held_slots for share in shares), default=0)
    return shared_with(others) if others else ""


def _runs_on(environment: Environment, model: str) -> bool:
    some = environment.models
    return not some or any(model_matches(each, model) for each in some)


def model_label(count: ModelCount) -> str:
    """Return a model's name with its memory, unless the name has it (A100-SXM4-80GB)."""
    memory = format_memory(count.memory_bytes)
    said = memory.replace(" ", "") in count.model.replace(" ", "")
    return count.model if said else f"{count.model}, {memory}"


def _what(gpus: int, models: Collection[str]) -> str:
    if len(models) > 1:
        return f"{gpus} GPU{'s' if gpus > 1 else ''}"
    (model,) = models
    return f"{gpus} x {model}" if gpus > 1 else model


def _poor(account: Account) -> str:
    kind, _, name = account.name.partition(":")
    whose = f"The group {name}'s" if kind == "group" else "Your"
    balance = format_credits(account.available)
    return f"{whose} balance of {balance} credits does not pay for the start."


def _span(rates: Sequence[int]) -> str:
    """Format sorted rates as ``4.00`` or ``1.00 to 4.00``."""
    least, most = format_price(rates[0]), format_price(rates[-1])
    return least if least == most else f"{least} to {most}"


def _join(names: Sequence[str]) -> str:
    if len(names) > MOST_NAMES:
        names = [*names[: MOST_NAMES - 1], f"{len(names) - MOST_NAMES + 1} others"]
    return f"in {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f"in {names[0]}"
