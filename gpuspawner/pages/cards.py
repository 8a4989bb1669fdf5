"""An environment as a card: what it is, what is free of it now, what it costs. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache

from markupsafe import Markup

from ..broker.outlook import Outlook
from ..broker.view import Overview
from ..catalog import Environment
from ..catalog.markdown import first_words
from ..ledger.rules import format_time_left
from ..model import Request
from .prices import Prices

PAGE = 60
"""Cards on one page."""

MOST_BADGES = 4
"""Frameworks that a card names."""

LONGEST = 100
"""Characters of a search."""


@dataclass(frozen=True, slots=True)
class Card:
    """What a card says of an environment."""

    environment: Environment
    face: Markup
    """Its logo, or the first letter of its name."""
    badges: Markup
    """What comes with it, and how many devices a server may have."""
    text: str
    """What it is, in a few words."""
    now: str
    """``3 of 8 GPUs free now``, and how long one waits otherwise."""
    at_once: bool
    """Whether a server would start at once."""
    price: str
    """For one device; empty where none fits."""
    open: bool = True
    """Whether whoever reads it may start it."""

    @property
    def slug(self) -> str:
        return self.environment.slug

    @property
    def name(self) -> str:
        return self.environment.display_name


@dataclass(frozen=True, slots=True)
class Wanted:
    """What somebody looks for."""

    words: str = ""
    gpu: str = ""
    """``with`` or ``without`` a GPU; empty is either."""
    framework: str = ""
    at_once: bool = False
    """Only what would start now."""

    def __bool__(self) -> bool:
        return bool(self.words or self.gpu or self.framework or self.at_once)

    def takes(self, environment: Environment) -> bool:
        """Whether an environment is what they look for, but for whether it starts now."""
        if self.gpu and environment.cpu_only != (self.gpu == "without"):
            return False
        if self.framework and self.framework not in (f.name for f in environment.frameworks):
            return False
        text = _haystack(environment)
        return all(word in text for word in self.words.casefold().split())


def make_cards(
    environments: Iterable[Environment],
    overview: Overview,
    outlooks: Mapping[str, Outlook],
    now: datetime,
    pages_url: str,
    closed: Iterable[str] = (),
) -> list[Card]:
    """A card for each. ``outlooks`` are by slug; ``pages_url`` is where the catalog's pages are;
    ``closed`` are the slugs that the reader sees and may not start."""
    some = list(environments)
    prices = Prices(overview, some, now)
    shut = frozenset(closed)
    return [
        Card(
            environment=environment,
            face=_face(environment, pages_url),
            badges=_badges(environment),
            text=first_words(environment.summary or environment.description),
            now=said(outlooks[environment.slug], cpu_only=environment.cpu_only),
            at_once=outlooks[environment.slug].at_once,
            price=prices.of(environment),
            open=environment.slug not in shut,
        )
        for environment in some
    ]


def usual_request(environment: Environment) -> Request:
    """What most members ask for there: what a card tells of."""
    if environment.cpu_only:
        return Request()
    return Request(
        devices=max(1, environment.devices.default),
        models=environment.models,
        memory_bytes=environment.min_memory,
    )


def devices_of(environment: Environment) -> str:
    """How many devices a server of it may have, in words."""
    most = environment.devices.max
    return f"up to {most} GPU{'s' if most > 1 else ''}" if most else "no GPU"


def said(outlook: Outlook, *, cpu_only: bool = False) -> str:
    """``3 of 8 GPUs free now, about 25 min wait``."""
    if cpu_only:
        return "Starts at once"
    if not outlook.total:
        return "No GPU here that fits"
    plural = "" if outlook.total == 1 else "s"
    free = f"{outlook.free} of {outlook.total} GPU{plural} free now"
    waits = waiting(outlook)
    return f"{free}, {waits}" if waits else free


def waiting(outlook: Outlook) -> str:
    """``about 25 min wait``; empty where it would start at once, or nobody can say."""
    if outlook.at_once:
        return ""
    if outlook.likely is not None:
        return f"about {_round(outlook.likely)} wait"
    if outlook.most is not None:
        return f"at most {_round(outlook.most)} wait"
    return "others wait" if outlook.ahead else ""


def frameworks_of(environments: Sequence[Environment]) -> list[str]:
    """The names of all that come with any of them."""
    return sorted({f.name for e in environments for f in e.frameworks}, key=str.casefold)


def _round(wait: timedelta) -> str:
    """Up to the minute, and to five of them where it is long."""
    minutes = max(1, math.ceil(wait / timedelta(minutes=1)))
    step = 1 if minutes <= 10 else 5
    return format_time_left(timedelta(minutes=math.ceil(minutes / step) * step))


# The same for everybody: made once.


@lru_cache(maxsize=1024)
def _face(environment: Environment, pages_url: str) -> Markup:
    if not environment.logo:
        letter = environment.display_name[:1].upper()
        logo = Markup('<span class="gs-logo" aria-hidden="true">{}</span>').format(letter)
    else:
        beside = not environment.logo.startswith("/")
        source = f"{pages_url}/{environment.slug}/logo" if beside else environment.logo
        logo = Markup(
            '<img class="gs-logo" src="{}" alt="" width="40" height="40" loading="lazy">'
        ).format(source)
    return Markup('<span class="gs-face">{}</span>').format(logo)


@lru_cache(maxsize=1024)
def _badges(environment: Environment) -> Markup:
    of_one = Markup('<span class="badge text-bg-light border">{} {}</span>')
    found = [of_one.format(f.name, f.version) for f in environment.frameworks[:MOST_BADGES]]
    devices = Markup('<span class="badge text-bg-secondary">{}</span>')
    return Markup(" ").join([*found, devices.format(devices_of(environment))])


def _haystack(environment: Environment) -> str:
    """All that a search looks at."""
    names = (f"{f.name} {f.version}" for f in environment.frameworks)
    parts = (
        environment.slug,
        environment.display_name,
        environment.summary,
        environment.description,
        *names,
    )
    return " ".join(parts).casefold()
