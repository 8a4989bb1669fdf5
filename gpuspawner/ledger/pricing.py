"""Rates: the price of a GPU-hour by model, environment and hour of the week. Pure.

If several rates match, an admin's rate from the store wins over the configuration's; then the most
specific wins, in this order: environment, model (one that names MIG instances, then the longest
name), share of a device, hours; then the one that applies since later; then, within the
configuration, the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from zoneinfo import ZoneInfo

from ..core.errors import ConfigError
from ..core.units import MICRO, DeviceCount, parse_credits
from ..devices.mig_profiles import names_instances
from ..devices.models import model_matches, model_words
from ..leases.models import LeasedDevice

DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")

HOURS = 7 * 24
"""Hours of a week; 0 is Monday from 00:00 to 01:00."""

HOUR = timedelta(hours=1)

_DAY = "|".join(DAYS)
_PART = re.compile(
    rf"(?:(?P<first>{_DAY})(?:-(?P<last>{_DAY}))?)?\s*"
    r"(?:(?P<begin>[0-9]{1,2})(?::00)?-(?P<end>[0-9]{1,2})(?::00)?)?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class WeekHours:
    """Some hours of each week, by the local time of a zone.

    An hour that daylight saving skips does not occur; one that occurs twice counts twice.
    """

    text: str
    """As an admin wrote it, such as ``Mon-Fri 20-8, Sat, Sun``."""
    hours: frozenset[int]
    """Hours of the week, see :data:`HOURS`."""
    zone: str
    """The zone's name, such as ``Europe/Vienna``."""

    @classmethod
    def parse(cls, text: object, zone: str) -> WeekHours:
        """Parse hours: ``Mon-Fri 20-8`` is each night from 20:00 to 8:00 starting on these days.

        Parts are separated by commas; one without days applies every day, one without hours the
        whole day. Raises ValueError with a sentence.
        """
        open_zone(zone)
        if not isinstance(text, str):
            raise ValueError(f"{text!r} are not hours of the week. {_REMEDY}")
        hours: set[int] = set()
        for part in text.split(","):
            hours |= _hours(part.strip())
        return cls(" ".join(text.split()), frozenset(hours), zone)

    def holds(self, at: datetime) -> bool:
        """Return True if the time (aware) is in these hours."""
        local = at.astimezone(open_zone(self.zone))
        return local.weekday() * 24 + local.hour in self.hours

    def next_change(self, at: datetime) -> datetime | None:
        """Return the first time after ``at`` (aware, in UTC) at which :meth:`holds` changes.

        None if it never does.
        """
        now, moment = self.holds(at), at
        for _ in range(HOURS + 2):
            moment = _next_hour(moment, self.zone)
            if self.holds(moment) != now:
                return moment
        return None


@lru_cache(maxsize=256)
def open_zone(name: str) -> ZoneInfo:
    """Return the time zone with this name. Raises ValueError with a sentence."""
    try:
        return ZoneInfo(name)
    except Exception:  # also IsADirectoryError, for a folder of zones
        raise ValueError(
            f"{name!r} is not a time zone: write a name such as 'Europe/Vienna' or 'UTC'."
        ) from None


_REMEDY = "Write them like 'Mon-Fri 20-8, Sat, Sun': days, and hours from 0 to 24."


def _hours(part: str) -> set[int]:
    """Return the hours of one part. Raises ValueError with a sentence."""
    found = _PART.fullmatch(part)
    if not part or not found:
        raise ValueError(f"{part!r} are not hours of the week. {_REMEDY}")
    begin, end = int(found["begin"] or 0), int(found["end"] or 24)
    if begin > 23 or end > 24 or begin == end:
        raise ValueError(f"{part!r} are not hours of a day. {_REMEDY}")
    length = (end - begin) % 24 or 24
    return {(24 * day + begin + n) % HOURS for day in _days(found) for n in range(length)}


def _days(found: re.Match[str]) -> list[int]:
    if not found["first"]:
        return list(range(7))
    first = DAYS.index(found["first"].capitalize())
    last = DAYS.index((found["last"] or found["first"]).capitalize())
    return [(first + n) % 7 for n in range((last - first) % 7 + 1)]


def _next_hour(at: datetime, zone: str) -> datetime:
    """Return the next time, in UTC, at which a new local hour may begin in that zone."""
    local = at.astimezone(open_zone(zone))
    gone = timedelta(minutes=local.minute, seconds=local.second, microseconds=local.microsecond)
    return at.astimezone(timezone.utc) + HOUR - gone


ANY = "*"
"""The pattern for every model, or for every environment."""

MAX_RATE = 1_000_000 * MICRO
"""The largest rate in microcredits per GPU-hour; anything above is a typing mistake."""

MOST_SLOTS = 100
"""The most parts of a device that a rate can name."""

_DECIMAL = re.compile(r"\d+(\.\d+)?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Credits per GPU-hour, and what they apply to."""

    amount: int
    """Microcredits per hour of one device or, with ``slots``, of one of its slots.

    A MIG instance costs its part of that, unless ``model`` is for instances only.
    """
    model: str = ANY
    """Words of a model's name, or ``*``."""
    environment: str = ANY
    """The entry of the catalog, or ``*``."""
    slots: int | None = None
    """The price is for one of this many slots of a device; None means the whole device.

    A slot without a rate of its own costs its share of the device, rounded up to the microcredit.
    """
    hours: WeekHours | None = None
    """Hours of the week at which a server starts; None means always."""
    since: datetime | None = None
    """Applies to servers that start from then on; None means always."""
    id: int | None = None
    """The id in the store; None for a rate of the configuration."""
    set_at: datetime | None = None
    actor: str = ""
    reason: str = ""

    def holds(self, at: datetime) -> bool:
        """Return True if it applies to servers that start at that time."""
        return (self.since is None or self.since <= at) and (
            self.hours is None or self.hours.holds(at)
        )

    @property
    def subject(self) -> tuple[object, ...]:
        """Equal for two rates that compete: they differ in the amount only."""
        hours = self.hours and (self.hours.hours, self.hours.zone)
        return normal_model(self.model), self.environment, self.slots, hours, self.since

    @property
    def particular(self) -> tuple[object, ...]:
        """The sort key of specificity: the greater wins over others that match as well."""
        return (
            self.id is not None,
            self.environment != ANY,
            names_instances(self.model),
            len(normal_model(self.model)) if self.model != ANY else -1,
            self.slots is not None,
            self.hours is not None,
            self.since.timestamp() if self.since else 0.0,
            self.id or 0,
            [-ord(letter) for letter in normal_model(self.model)],
        )


@dataclass(frozen=True, slots=True)
class RateCard:
    """The prices at one moment in one environment; the first rate that matches applies."""

    rates: tuple[Rate, ...] = ()

    def rate_of(
        self, model: str, slots: int = 1, part: DeviceCount = 1, held_slots: int = 1
    ) -> int:
        """Return the microcredits per hour of a device of this model, or of some of its ``slots``.

        A MIG instance, which is ``part`` of a GPU, costs its part of the GPU's rate, rounded up to
        the microcredit; a rate for instances only is taken as it is. A GPU that no rate names costs
        1 credit an hour.
        """
        rate = self.find(model, slots)
        if part != 1 and rate is not None and names_instances(rate.model):
            part = 1
        part = part * held_slots
        if rate is None or rate.slots is None:
            part = part * Fraction(1, slots)
        return -(-(rate.amount if rate else MICRO) * part // 1)

    def find(self, model: str, slots: int = 1) -> Rate | None:
        """Return the rate that applies to a device of this model; None if there is none."""
        for rate in self.rates:
            if rate.slots in (None, slots) and (
                rate.model == ANY or model_matches(rate.model, model)
            ):
                return rate
        return None

    def price(self, devices: Iterable[LeasedDevice]) -> int:
        """Return the microcredits per hour for what is leased of these devices; 0 for none."""
        return sum(
            self.rate_of(each.model, each.slots, each.part, each.held_slots)
            if each.is_shared
            else self.rate_of(each.model, part=each.part)
            for each in devices
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """All rates from the store and the configuration, the most specific first."""

    rates: tuple[Rate, ...] = ()

    @classmethod
    def of(cls, *some: Iterable[Rate]) -> Rates:
        """Combine these rates."""
        every = chain.from_iterable(some)
        return cls(tuple(sorted(every, key=lambda rate: rate.particular, reverse=True)))

    def card(self, at: datetime, environment: str = "") -> RateCard:
        """Return the prices for servers that start at that time in that environment."""
        return RateCard(
            tuple(
                rate
                for rate in self.rates
                if rate.environment in (ANY, environment) and rate.holds(at)
            )
        )

    def next_change(self, at: datetime) -> datetime | None:
        """Return the first time after ``at`` at which a rate starts or stops applying.

        None if none does within a week.
        """
        moments = [rate.since for rate in self.rates if rate.since and rate.since > at]
        for hours in {rate.hours for rate in self.rates if rate.hours}:
            if moment := hours.next_change(at):
                moments.append(moment)
        return min(moments, default=None)


# Parsing what admins write.


def rates_by_model(config: Mapping[str, int | float | str | Decimal]) -> list[Rate]:
    """Parse ``{"*": 1, "A100": 4, "A100 MIG 1g.5gb": "0.5"}``. Raises ConfigError with the key."""
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"The rates are not valid: {config!r} is not a mapping of model to credits per "
            'GPU-hour. Write them like {"*": 1, "A100": 4}.'
        )
    rates: dict[str, Rate] = {}
    for key, value in config.items():
        try:
            amount = parse_rate(value)
        except ValueError as error:
            raise ConfigError(f"The rate of {key!r} is not valid: {error}") from None
        try:
            normal = normal_model(check_model(key))
        except ValueError as error:
            raise ConfigError(f"The rates are not valid: {error}") from None
        if normal in rates:
            raise ConfigError(
                f"The rates are not valid: {rates[normal].model!r} and {key!r} name the same "
                "model. Keep one of them."
            )
        rates[normal] = Rate(model=key, amount=amount)
    return list(rates.values())


_FIELDS = ("rate", "model", "environment", "slots", "hours", "from")


def special_rates(config: Sequence[Mapping[str, object]], zone: str) -> list[Rate]:
    """Parse ``[{"model": "A100", "hours": "20-8", "rate": 2}]``.

    Hours and dates are local times of ``zone``. Raises ConfigError naming the entry.
    """
    rates: dict[object, int] = {}
    found = []
    for number, entry in enumerate(config, start=1):
        what = f"Entry {number} of c.GPURates.special is not valid"
        if not isinstance(entry, Mapping):
            raise ConfigError(f'{what}: {entry!r} is none. Write {{"model": "A100", "rate": 2}}.')
        unknown = [str(name) for name in entry if name not in _FIELDS]
        if unknown or "rate" not in entry:
            wrong = f"it has {unknown[0]!r}" if unknown else "its 'rate' is missing"
            raise ConfigError(f"{what}: {wrong}. The fields are {', '.join(_FIELDS)}.")
        try:
            rate = Rate(
                amount=parse_rate(entry["rate"]),
                model=check_model(entry.get("model", ANY)),
                environment=check_environment(entry.get("environment", ANY)),
                slots=check_slots(entry.get("slots")),
                hours=WeekHours.parse(entry["hours"], zone) if entry.get("hours") else None,
                since=parse_moment(entry["from"], zone) if entry.get("from") else None,
            )
        except ValueError as error:
            raise ConfigError(f"{what}: {error}") from None
        if rate.subject in rates:
            raise ConfigError(f"{what}: entry {rates[rate.subject]} is for the same. Keep one.")
        rates[rate.subject] = number
        found.append(rate)
    return found


def parse_rate(value: object) -> int:
    """Parse credits per hour as microcredits. Raises ValueError with a sentence."""
    remedy = "Write credits per GPU-hour as a decimal number of at least 0, such as 4 or '0.5'."
    fits = isinstance(value, (int, float, str, Decimal)) and not isinstance(value, bool)
    said = _short(value)
    text = said if isinstance(value, int) and abs(value) > 10**40 else str(value).strip()
    if not fits or not _DECIMAL.fullmatch(text):
        raise ValueError(f"{said}. {remedy}")
    try:
        rate = parse_credits(text)
    except ValueError:
        raise ValueError(f"{said} has more than six decimals. {remedy}") from None
    if rate > MAX_RATE:
        raise ValueError(f"{said} credits an hour is more than 1000000. {remedy}")
    return rate


def check_model(value: object) -> str:
    """Return a valid model pattern. Raises ValueError with a sentence."""
    short = isinstance(value, str) and len(value) <= 100 and value.isprintable()
    if isinstance(value, str) and short and (value.strip() == ANY or model_words(value)):
        return value.strip()
    raise ValueError(
        f"{_short(value)} names no device model. Write part of a model's name such as 'A100', "
        "or '*' for every other model."
    )


def check_environment(value: object) -> str:
    """Return a valid environment name. Raises ValueError with a sentence."""
    if isinstance(value, str) and 0 < len(value.strip()) <= 100 and value.isprintable():
        return value.strip()
    raise ValueError(
        f"{_short(value)} names no environment. Write its name in the catalog such as 'pytorch', "
        "or '*' for all."
    )


def check_slots(value: object) -> int | None:
    """Return a valid number of slots that a device has. Raises ValueError with a sentence."""
    if value is None:
        return None
    if type(value) is int and 1 <= value <= MOST_SLOTS:
        return value
    raise ValueError(
        f"{_short(value)} is not a number of slots. Write from 1 to {MOST_SLOTS}: 4 is for a "
        "quarter of a device."
    )


def parse_moment(value: object, zone: str) -> datetime:
    """Parse ``2026-10-01`` or ``2026-10-01 08:00`` in ``zone``, or with an offset of its own.

    Raises ValueError with a sentence.
    """
    try:
        text = value.isoformat() if hasattr(value, "isoformat") else str(value).strip()
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=open_zone(zone))
        return moment.astimezone(timezone.utc)
    except (ValueError, OverflowError):
        open_zone(zone)  # which raises for an unknown zone
        raise ValueError(
            f"{_short(value)} is not a date. Write it like 2026-10-01 or '2026-10-01 08:00'."
        ) from None


def normal_model(pattern: str) -> str:
    """Return the pattern's words as one text, in a fixed order."""
    return ANY if pattern == ANY else " ".join(sorted(set(model_words(pattern))))


def _short(value: object) -> str:
    """Shorten an input for use in a sentence."""
    if isinstance(value, int) and abs(value) > 10**40:  # Python refuses to format some
        return "that number"
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
