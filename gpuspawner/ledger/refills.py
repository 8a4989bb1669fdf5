"""Recurring refills: how much, for whom, and when they recur. Pure.

Rules use local time. An occurrence in an hour that daylight saving skips comes as late as if the
clock had not been changed; one in an hour that occurs twice comes at the first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from enum import Enum
from itertools import islice, pairwise

from dateutil.rrule import rrule, rrulestr

from ..core.errors import InvalidRequest
from ..core.units import format_credits
from .models import Account, check_account, member_account
from .pricing import open_zone

LONGEST = 400
"""Characters of a rule."""

FREQUENCIES = ("DAILY", "WEEKLY", "MONTHLY", "YEARLY")

YEARS = 10
"""A rule without an occurrence for this many years is taken for a mistake."""

LEAST_GAP = timedelta(hours=1)
"""The minimum between two occurrences."""

LOOKED_AT = 400
"""How many occurrences of a new rule are checked for their distance."""

_PARTS = frozenset(
    {"FREQ", "INTERVAL", "COUNT", "UNTIL", "WKST", "BYMONTH", "BYMONTHDAY", "BYYEARDAY"}
    | {"BYWEEKNO", "BYDAY", "BYSETPOS", "BYHOUR", "BYMINUTE"}
)
_UNTIL = re.compile(r"([0-9]{8})(?:T([0-9]{6})(Z?))?")
_MOST = {"INTERVAL": 1000, "COUNT": 100_000}


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A rule with its zone and its start. Create it with :meth:`parse`."""

    rule: str
    """For example ``FREQ=WEEKLY;BYDAY=MO``."""
    zone: str
    starts_at: datetime
    """Timezone-aware, in UTC: no occurrence is earlier. All have its time of day, unless the rule
    names hours; they are full hours if it names no minutes."""

    @classmethod
    def parse(cls, text: str, zone: str, starts_at: datetime) -> Recurrence:
        """Parse a rule. Raises ValueError with a sentence.

        Also for a rule that never occurs, or too often.
        """
        made = cls(_normal(text), zone, starts_at.astimezone(timezone.utc))
        open_zone(zone)
        try:
            first = list(islice(made.after(made.starts_at, inclusive=True), LOOKED_AT))
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise ValueError(
                f"{_short(text)} is not a recurrence rule: {error}. {_REMEDY}"
            ) from None
        if not first or first[0] > made.starts_at + YEARS * timedelta(days=366):
            raise ValueError(
                f"{_short(text)} never occurs: there is no such day within {YEARS} years. {_REMEDY}"
            )
        if any(later - one < LEAST_GAP for one, later in pairwise(first)):
            raise ValueError(f"{_short(text)} occurs more than once an hour. {_REMEDY}")
        return made

    def after(self, moment: datetime, *, inclusive: bool = False) -> Iterator[datetime]:
        """Yield the occurrences after the time, or from it on, in UTC and in order."""
        zone = open_zone(self.zone)
        # A day earlier: local times are not always in order.
        wall = moment.astimezone(zone).replace(tzinfo=None) - timedelta(days=1)
        last = None
        for local in self._wall().xafter(wall, inc=True):
            try:
                at = local.replace(tzinfo=zone).astimezone(timezone.utc)
            except OverflowError:  # past the year 9999
                return
            # Two local times may be the same moment, if one of them is skipped.
            if (at > moment or (inclusive and at == moment)) and at != last:
                last = at
                yield at

    def next(self, moment: datetime) -> datetime | None:
        """Return the first occurrence after the time; None if there is no other."""
        return next(self.after(moment), None)

    def _wall(self) -> rrule:
        zone = open_zone(self.zone)
        start = self.starts_at.astimezone(zone).replace(tzinfo=None)
        rule = _UNTIL_PART.sub(lambda found: f"UNTIL={_until(found[1], self.zone)}", self.rule)
        if "BYHOUR=" in rule and "BYMINUTE=" not in rule:
            rule += ";BYMINUTE=0"  # RFC 5545 has the minute at which the refill was created
        made = rrulestr(rule, dtstart=start)
        assert isinstance(made, rrule)  # one line is one rule
        return made


_UNTIL_PART = re.compile(r"UNTIL=([^;]*)")


def _until(text: str, zone: str) -> str:
    """Return the end of the rule in local time; a date includes the whole day."""
    found = _UNTIL.fullmatch(text)
    if not found:
        raise ValueError(f"UNTIL={text[:40]} is neither 20271231 nor 20271231T120000Z")
    day, time, utc = found.groups()
    if not time:
        return f"{day}T235959"
    if not utc:
        return f"{day}T{time}"
    moment = datetime.strptime(f"{day}{time}", "%Y%m%d%H%M%S").replace(tzinfo=timezone.utc)
    return moment.astimezone(open_zone(zone)).strftime("%Y%m%dT%H%M%S")


def _normal(text: str) -> str:
    """Return the rule in capitals and without its prefix. Raises ValueError if it is invalid."""
    rule = text.strip().upper().removeprefix("RRULE:")
    if len(rule) > LONGEST or not rule.isascii() or not rule.isprintable() or " " in rule:
        raise ValueError(f"{_short(text)} is not a recurrence rule. {_REMEDY}")
    parts: dict[str, str] = {}
    for part in rule.rstrip(";").split(";"):
        name, equals, value = part.partition("=")
        if name == "BYSECOND" or (name == "FREQ" and value in ("SECONDLY", "MINUTELY", "HOURLY")):
            raise ValueError(f"{_short(text)} comes too often: once a day, say. {_REMEDY}")
        if not equals or not value or name not in _PARTS or name in parts:
            raise ValueError(
                f"{_short(text)} is not a recurrence rule: see {part[:40]!r}. {_REMEDY}"
            )
        most = _MOST.get(name)
        if most and not (value.isdigit() and 1 <= int(value[:9]) <= most):
            raise ValueError(f"{part[:40]} is not from 1 to {most}. {_REMEDY}")
        parts[name] = value
    if parts.get("FREQ") not in FREQUENCIES:
        raise ValueError(f"{_short(text)} does not say how often. {_REMEDY}")
    return ";".join(f"{name}={value}" for name, value in parts.items())


_REMEDY = (
    "Write it like FREQ=WEEKLY;BYDAY=MO;BYHOUR=8 or FREQ=MONTHLY;BYMONTHDAY=1 (RFC 5545, with "
    f"FREQ={', '.join(FREQUENCIES[:-1])} or {FREQUENCIES[-1]})."
)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "...")


EVERYBODY = "everybody"
"""Every member who has an account."""

_MEMBERS_OF = "members:"

LONGEST_KEPT = timedelta(days=3660)
"""The longest time that credits of a refill can be kept."""


class Mode(str, Enum):
    """What an occurrence does to a balance."""

    ADD = "add"
    """The amount is added."""
    TOP_UP = "top_up"
    """The balance is filled up to the amount."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refill:
    """A recurring refill."""

    id: str
    recurrence: Recurrence
    mode: Mode
    amount: int
    """Microcredits, for each account."""
    audience: tuple[str, ...]
    """Who gets it: ``everybody``, ``members:GROUP``, ``member:NAME`` or ``group:NAME``.

    ``members:GROUP`` means each member of a group of the Hub, the last two are accounts.
    """
    cap: int | None = None
    """No balance is raised above this many microcredits."""
    keep: timedelta | None = None
    """How long until what is left of an occurrence's credits is taken back."""
    reason: str
    made_at: datetime
    made_by: str
    next_at: datetime | None = None
    """The occurrence that is granted next; None if there is no other."""
    ended_at: datetime | None = None
    """When an admin ended it."""

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of the Hub whose members get it."""
        return tuple(
            name.removeprefix(_MEMBERS_OF) for name in self.audience if name.startswith(_MEMBERS_OF)
        )

    def gift(self, balance: int) -> int:
        """Return the microcredits that an account with this balance gets; never below zero."""
        gift = self.amount if self.mode is Mode.ADD else self.amount - balance
        if self.cap is not None:
            gift = min(gift, self.cap - balance)
        return max(0, gift)

    def accounts(
        self,
        known: Iterable[tuple[Account, datetime]],
        members: Mapping[str, Collection[str]],
        occurrence: datetime,
    ) -> list[Account]:
        """Return who gets an occurrence, of the ``known`` accounts that were open then.

        ``members`` are those of each of :attr:`groups`.
        """
        named = set(self.audience)
        for group in self.groups:
            named |= {member_account(user) for user in members.get(group, ())}
        everybody = EVERYBODY in named
        return [
            account
            for account, opened_at in known
            if opened_at <= occurrence
            and (account.name in named or (everybody and account.name.startswith("member:")))
        ]

    def key(self, occurrence: datetime, account: str) -> str:
        """Return the idempotency key of what an account gets at an occurrence."""
        moment = occurrence.astimezone(timezone.utc)
        return f"refill:{self.id}:{moment:%Y%m%dT%H%M%S}:{account}"


def check_audience(names: Iterable[str]) -> tuple[str, ...]:
    """Return a valid audience. Raises InvalidRequest for an empty or ambiguous one."""
    found = tuple(dict.fromkeys(name.strip() for name in names))
    if not found:
        raise InvalidRequest(
            f"Say who gets it: {EVERYBODY}, members:GROUP, member:NAME or group:NAME.",
            field="audience",
        )
    for name in found:
        if name == EVERYBODY or name.removeprefix(_MEMBERS_OF).strip() not in ("", name):
            continue
        if not name.startswith(("member:", "group:")):
            raise InvalidRequest(
                f"{name[:60]!r} is not an audience: write {EVERYBODY}, members:GROUP (each member "
                "of a group), member:NAME or group:NAME (a group's account).",
                field="audience",
            )
        check_account(name)
    return found


def check_amounts(mode: Mode, amount: int, cap: int | None, keep: timedelta | None) -> None:
    """Raise InvalidRequest for amounts that can give nothing, or too much."""
    if amount <= 0:
        raise InvalidRequest(
            f"A refill of {format_credits(amount)} credits grants nothing: write more than 0.",
            field="amount",
        )
    if cap is not None and (cap <= 0 or (mode is Mode.TOP_UP and cap < amount)):
        what = f"the amount of {format_credits(amount)}" if cap > 0 else "0"
        raise InvalidRequest(
            f"The cap of {format_credits(cap)} credits is not above {what}: it would have no "
            "effect. Write a larger one, or leave it out.",
            field="cap",
        )
    if keep is not None and not timedelta(0) < keep <= LONGEST_KEPT:
        raise InvalidRequest(
            f"The credits of a refill can be kept for up to {LONGEST_KEPT.days} days, and for "
            "more than 0.",
            field="keep",
        )
