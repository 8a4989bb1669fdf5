"""The roster: who is a member for which time, as admins import it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from ..ledger.rules import ACTOR_ACCOUNTING
from ..ledger.week import open_zone
from ..store import memberships, roster
from ..store.roster import Entry
from .membership import Memberships


@dataclass(frozen=True, slots=True)
class OnRoster:
    """What the roster says of a name at one moment."""

    member: bool
    groups: frozenset[str] = frozenset()
    """Of all entries that hold."""
    until: datetime | None = None
    """When the last of them ends; None: none of them, or never."""
    why: str = ""
    """Why they are no member by it, to go on after "but" or "because"."""


class Rosters(Memberships):
    """The part of the broker that keeps the roster."""

    def roster(self) -> list[Entry]:
        """The whole roster, by name and course, what is over included."""
        return self.store.run(roster.every)

    def roster_member(self, user: str, now: datetime | None = None) -> OnRoster:
        """Whether a name is on the roster now, with which groups and until when, else why not."""
        now = now or self.clock()
        entries = self.store.run(lambda connection: roster.of_user(connection, user))
        return self._verdict(entries, now)

    def see_to_roster(self) -> int:
        """End the memberships of those whose time on the roster is over, who are members by
        nothing else; and let those back whose end the roster alone had brought. How many."""
        now = self.clock()
        with self.store.read() as connection:
            let_in = memberships.by_roster(connection)
            entries: dict[str, list[Entry]] = {}
            for entry in roster.every(connection) if let_in else ():
                entries.setdefault(entry.user, []).append(entry)
        changed = 0
        for known in let_in:
            said = self._verdict(entries.get(known.user.lower(), []), now)
            if known.ended_at is None and not said.member:
                changed += self.membership_ended(known.user, said.why, actor=ACTOR_ACCOUNTING)
            elif known.ended_at and known.actor == ACTOR_ACCOUNTING and said.member:
                changed += self.membership_returned(
                    known.user, actor=ACTOR_ACCOUNTING, by_roster=True
                )
        return changed

    def _verdict(self, entries: list[Entry], now: datetime) -> OnRoster:
        holding = [entry for entry in entries if entry.holds(now)]
        if holding:
            ends = [entry.ends_at for entry in holding]
            known = [end for end in ends if end is not None]
            return OnRoster(
                member=True,
                groups=frozenset(group for entry in holding for group in entry.groups),
                until=max(known) if len(known) == len(ends) else None,
            )
        if not entries:
            return OnRoster(member=False, why="this name is not on the roster of members")
        coming = [e for e in entries if e.starts_at and e.starts_at > now and not _over(e, now)]
        if coming:
            first = min(coming, key=lambda entry: entry.starts_at or now)
            starts = self.roster_day(first.starts_at)
            return OnRoster(
                member=False, why=f"the time on the roster{_of(first)} starts on {starts}"
            )
        last = max(entries, key=lambda entry: entry.ends_at or now)
        ended = self.roster_day(last.ends_at, end=True)
        return OnRoster(member=False, why=f"the time on the roster{_of(last)} ended on {ended}")

    def roster_day(self, moment: datetime | None, *, end: bool = False) -> str:
        """A moment as admins write it, by the clock of ``c.Broker.rate_zone``: a day, with the
        time of day unless that is midnight. An ``end`` at midnight is of the day before."""
        if moment is None:
            return ""
        local = moment.astimezone(open_zone(self.rate_zone))
        if (local.hour, local.minute, local.second) != (0, 0, 0):
            return f"{local:%Y-%m-%d %H:%M %Z}"
        return f"{local - timedelta(days=1) if end else local:%Y-%m-%d}"


def _over(entry: Entry, now: datetime) -> bool:
    return entry.ends_at is not None and entry.ends_at <= now


def _of(entry: Entry) -> str:
    return f" ({entry.course})" if entry.course else ""
