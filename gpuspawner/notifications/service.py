"""Notices to members: their texts, and which were read, chosen and sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import jinja2
from jinja2.ext import Extension

from ..core.times import deadline
from ..core.units import format_credits
from ..db.engine import Store
from . import repository
from .models import Notice, NoticeKind
from .repository import ChannelChoice, Outcome


class _Paragraph(Extension):
    """Lines of a template are wrapped for who edits it: all of them are one line of the notice.

    What is filled in keeps its own lines.
    """

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        return " ".join(source.split())


_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("gpuspawner.notifications"),
    autoescape=jinja2.select_autoescape(("html",), default=False),
    undefined=jinja2.StrictUndefined,
    extensions=[_Paragraph],
)
_TEMPLATES.filters |= {"credits": format_credits, "deadline": deadline}


def compose(
    template: str, kind: NoticeKind, key: str, user: str, now: datetime, **values: Any
) -> Notice:
    """Return the notice that a template makes of these values and of ``now``.

    ``template``: a file among the templates, without its ending. ``key``: a notice of the same key
    is told once. ``values``: what the template fills in, and what :func:`_facts` takes.
    """
    words: Any = _TEMPLATES.get_template(f"{template}.txt").make_module({"now": now, **values})
    title, body = words.title.strip(), words.body.strip()
    facts = _facts(template, values)
    return Notice(key=key, user=user, kind=kind, title=title, body=body, at=now, facts=facts)


def _facts(template: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the admin's command reads besides the words: the same fields for every notice.

    Those of the lease, if the notice is about one, and ``balance``, ``rate`` (microcredits),
    ``minutes``, ``stops_at`` and ``reason``, if they are among the values.
    """
    lease = values.get("lease")
    return {
        "event": template,
        "lease": lease and lease.id,
        "server": lease and lease.server.name,
        "environment": lease and lease.environment,
        "gpus": list(lease.uuids) if lease else [],
        "account": lease and lease.account,
        "balance": _credits(values.get("balance")),
        "rate_per_hour": _credits(values.get("rate")),
        "minutes": values.get("minutes"),
        "ends_at": _instant(lease and lease.ends_at),
        "stops_at": _instant(values.get("stops_at")),
        "reason": values.get("reason") or (lease.end_reason if lease else ""),
    }


def _credits(amount: int | None) -> str | None:
    return None if amount is None else format_credits(amount, 6)


def _instant(moment: datetime | None) -> str | None:
    """Format a time for commands: ISO 8601 in UTC."""
    if moment is None:
        return None
    return moment.astimezone(timezone.utc).isoformat(timespec="milliseconds")


TOO_OLD = timedelta(days=1)
"""Older notices are not sent any more; they stay on the member's page."""


@dataclass(eq=False)
class NotificationService:
    """Notices to members, and their choices of channels. Every method is one transaction."""

    store: Store
    clock: Callable[[], datetime]

    def add_notice(self, notice: Notice) -> bool:
        """Add a notice. Returns False, and changes nothing, if its key was used before."""
        return self.store.run(lambda connection: repository.add(connection, notice), write=True)

    def notices_of(self, user: str, limit: int = 20) -> list[Notice]:
        """Return a member's newest notices, newest first."""
        return self.store.run(lambda connection: repository.of_user(connection, user, limit))

    def choices(self, user: str) -> dict[str, ChannelChoice]:
        """Return a member's choices by channel, without channels that they never set."""
        return self.store.run(lambda connection: repository.choices(connection, [user]))[user]

    def choose(self, user: str, choices: Iterable[ChannelChoice]) -> None:
        """Store a member's choices, already checked by :meth:`Channel.choice`."""
        found = list(choices)
        self.store.run(lambda connection: repository.choose(connection, user, found), write=True)

    # What the notifier asks.

    def unsent(self, tries: int) -> list[int]:
        """Return ids of notices to send: not too old, and tried less often than ``tries``."""
        since = self.clock() - TOO_OLD
        return self.store.run(lambda connection: repository.unsent(connection, since, tries))

    def with_choices(self, ids: Collection[int]) -> list[tuple[Notice, dict[str, ChannelChoice]]]:
        """Return notices, oldest first, each with its member's choices."""
        with self.store.read() as connection:
            found = repository.some(connection, ids)
            chosen = repository.choices(connection, {notice.user for notice in found})
        return [(notice, chosen[notice.user]) for notice in found]

    def mark(self, outcomes: Mapping[int, Outcome]) -> None:
        """Record the results of notices, by id."""
        self.store.run(lambda connection: repository.mark(connection, outcomes), write=True)
