"""The roster: who is a member for which time, as admins import it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import sqlalchemy as sa

from ..errors import InvalidRequest
from ..ledger.bulk import Problem
from ..ledger.rules import ACTOR_ACCOUNTING
from ..ledger.week import open_zone
from ..store import closures, memberships, roster
from ..store.roster import Entry
from . import roster_file
from .admin import checked_reason
from .membership import Memberships
from .roster_file import Listed


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


@dataclass(frozen=True, slots=True)
class Change:
    """What an import did to an entry, or would do."""

    number: int
    """Of the line in the file; 0 for an entry that is not in it."""
    before: Entry | None
    after: Entry

    @property
    def event(self) -> str:
        """``new``, ``changed``, ``ended`` (it is not in the file), or ``same``."""
        if not self.number:
            return "ended"
        if self.before is None:
            return "new"
        return "same" if self.before == self.after else "changed"


@dataclass(frozen=True, slots=True)
class Import:
    """What a file did to the roster, or would do."""

    changes: tuple[Change, ...]
    problems: tuple[Problem, ...]
    """With one of these nothing was changed."""
    done: bool
    """Whether it was written now."""

    def count(self, event: str) -> int:
        """How many entries that happened to."""
        return sum(change.event == event for change in self.changes)


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

    def import_roster(
        self, data: bytes, *, actor: str, dry_run: bool = False, whole: bool = False
    ) -> Import:
        """Write what a CSV file says, all of it or nothing, or say what that would do.

        ``whole``: the file is all there is of its courses, and entries of these that are not in
        it end now. Others stay as they are, for the file may be one course of many.
        """
        now = self.clock()
        listed, problems = roster_file.parse(data, self.rate_zone)
        if dry_run or problems:
            with self.store.read() as connection:
                changes = _changes(connection, listed, whole, now)
            return Import(changes, tuple(problems), done=False)
        with self.store.write() as connection:
            changes = _changes(connection, listed, whole, now)
            done = Import(changes, (), done=True)
            events = {event: done.count(event) for event in ("new", "changed", "ended")}
            if any(events.values()):
                roster.put(connection, (c.after for c in changes if c.event != "same"), now)
                detail = ", ".join(f"{count} {event}" for event, count in events.items() if count)
                self._note_roster(connection, "roster import", "roster", actor, detail, now)
        return done

    def end_on_roster(
        self, user: str, *, actor: str, reason: str = "", course: str | None = None
    ) -> list[Entry]:
        """End every entry of a name now, or that of a course; those that were ended. Whoever is a
        member by the roster alone is none any more when the accounting service sees it.

        Raises InvalidRequest for a name that has none which goes on.
        """
        now, reason = self.clock(), checked_reason(reason)
        with self.store.write() as connection:
            entries = [
                entry
                for entry in roster.of_user(connection, user)
                if course in (None, entry.course)
            ]
            ending = [entry for entry in entries if not _over(entry, now)]
            if not ending:
                what = "has ended already" if entries else "is not there"
                of = f" for {course[:60]!r}" if course else ""
                raise InvalidRequest(
                    f"The entry of {user[:60]!r} on the roster{of} {what}: "
                    "`gpuspawner roster show` lists who is on it. Nothing was changed.",
                    field="name",
                )
            roster.put(connection, (_ended(entry, now) for entry in ending), now)
            name = ending[0].user
            detail = f"{course}: {reason}".strip(": ") if course else reason
            self._note_roster(connection, "roster end", f"member:{name}", actor, detail, now)
        return ending

    def see_to_roster(self) -> int:
        """End the memberships of those whose time on the roster is over, who are members by
        nothing else; and let those back whose end the roster alone had brought. How many."""
        now = self.clock()
        with self.store.read() as connection:
            found = [
                (known, roster.of_user(connection, known.user))
                for known in memberships.to_compare(connection, now)
            ]
        changed = 0
        for known, entries in found:
            said = self._verdict(entries, now)
            if known.ended_at is None and not said.member:
                changed += self.membership_ended(known.user, said.why, actor=ACTOR_ACCOUNTING)
            elif known.ended_at and known.actor == ACTOR_ACCOUNTING and said.member:
                changed += self.membership_returned(
                    known.user, actor=ACTOR_ACCOUNTING, by_roster=True
                )
        return changed

    # Steps of the above.

    def _note_roster(
        self,
        connection: sa.Connection,
        action: str,
        subject: str,
        actor: str,
        detail: str,
        now: datetime,
    ) -> None:
        closures.note(
            connection, at=now, actor=actor, action=action, subject=subject, detail=detail
        )

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


def _changes(
    connection: sa.Connection, listed: Sequence[Listed], whole: bool, now: datetime
) -> tuple[Change, ...]:
    known = {(entry.user, entry.course): entry for entry in roster.every(connection)}
    found = [
        Change(each.number, known.get((each.entry.user, each.entry.course)), each.entry)
        for each in listed
    ]
    if whole:
        found += _left_out(known.values(), [each.entry for each in listed], now)
    return tuple(found)


def _left_out(known: Collection[Entry], listed: Sequence[Entry], now: datetime) -> Iterator[Change]:
    """The entries of the same courses that are not in a file that is all there is of them."""
    courses = {entry.course for entry in listed}
    there = {(entry.user, entry.course) for entry in listed}
    for entry in known:
        missing = entry.course in courses and (entry.user, entry.course) not in there
        if missing and not _over(entry, now):
            yield Change(0, entry, _ended(entry, now))


def _ended(entry: Entry, now: datetime) -> Entry:
    """An entry that holds no more; one that never held never will."""
    began = entry.starts_at is None or entry.starts_at < now
    return replace(entry, ends_at=now, starts_at=entry.starts_at if began else None)


def _over(entry: Entry, now: datetime) -> bool:
    return entry.ends_at is not None and entry.ends_at <= now


def _of(entry: Entry) -> str:
    return f" ({entry.course})" if entry.course else ""
