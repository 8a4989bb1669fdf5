"""The roster: who is a member and for how long, imported from a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import sqlalchemy as sa

from ..core.errors import InvalidRequest, LedgerError
from ..core.text import checked_reason
from ..db.engine import Store
from ..ledger.grant_files import Problem, by_column, cells_of, decoded
from ..ledger.models import check_account, group_account, member_account
from ..ledger.prices import GPURates
from ..ledger.pricing import open_zone, parse_moment
from ..ledger.rules import ACTOR_ACCOUNTING
from ..ledger.service import note
from . import repository
from .repository import RosterEntry
from .service import MemberService

LONGEST = 200
"""Maximum characters of a name, a course, a group or an address."""

_COLUMNS = {
    **dict.fromkeys(("name", "member", "user", "username", "login"), "user"),
    "course": "course",
    **dict.fromkeys(("group", "groups"), "groups"),
    **dict.fromkeys(("start", "starts", "from"), "starts_at"),
    **dict.fromkeys(("end", "ends", "until"), "ends_at"),
    **dict.fromkeys(("mail", "email", "e-mail"), "mail"),
}
_WRITE = "write name and, if you like, groups, course, starts, ends, mail"
_MAIL = re.compile(r"[^\s@<>,;]+@[^\s@<>,;]+")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


@dataclass(frozen=True, slots=True)
class RosterLine:
    """A line of the table."""

    number: int
    """The number of the line in the file, from 1."""
    entry: RosterEntry


def parse(data: bytes, zone: str) -> tuple[list[RosterLine], list[Problem]]:
    """Parse a file into its entries and problems. Dates are in ``zone``."""
    try:
        rows = list(cells_of(decoded(data)))
        columns = _columns(rows)
    except ValueError as error:
        return [], [Problem(0, str(error))]
    found: list[RosterLine] = []
    problems: list[Problem] = []
    for number, cells in rows[1:]:
        try:
            found.append(RosterLine(number, _entry(cells, columns, zone)))
        except (ValueError, LedgerError) as error:
            problems.append(Problem(number, str(error)))
    if len(rows) < 2:
        problems.append(Problem(0, "The file names no members."))
    return found, sorted([*problems, *_twice(found)], key=lambda problem: problem.number)


def _columns(rows: Sequence[tuple[int, list[str]]]) -> list[str]:
    """Return the columns, named by the first line. Raises ValueError."""
    if not rows:
        return []
    number, first = rows[0]
    names = [_COLUMNS.get(cell.lower(), "") for cell in first]
    if "user" not in names:
        raise ValueError(f"Line {number} has to name the columns: {_WRITE}.")
    for cell, name in zip(first, names, strict=True):
        if not name:
            raise ValueError(
                f"Line {number} has a column {cell[:60]!r} that a roster does not have: remove "
                f"it, or {_WRITE}."
            )
        if names.count(name) > 1:
            raise ValueError(f"Line {number} has a duplicate column ({cell[:60]!r}): remove one.")
    return names


def _entry(cells: Sequence[str], columns: Sequence[str], zone: str) -> RosterEntry:
    """Parse a line. Raises ValueError or LedgerError with a sentence."""
    values = by_column(cells, columns, "put a text with commas in quotes.")
    for name, text in values.items():
        if len(text) > (LONGEST * 10 if name == "groups" else LONGEST) or not text.isprintable():
            raise ValueError(f"{text[:40]!r}... is too long, or has unreadable characters.")
    user = values.get("user", "").lower()
    if not user:
        raise ValueError("it names no member.")
    check_account(member_account(user))
    starts_at, ends_at = _times(values, zone)
    return RosterEntry(
        user=user,
        course=values.get("course", ""),
        groups=_groups(values.get("groups", "")),
        mail=_mail(values.get("mail", "")),
        starts_at=starts_at,
        ends_at=ends_at,
    )


def _times(values: Mapping[str, str], zone: str) -> tuple[datetime | None, datetime | None]:
    """Return start and end; a date includes the whole day."""
    starts, ends = values.get("starts_at", ""), values.get("ends_at", "")
    starts_at = parse_start(starts, zone) if starts else None
    ends_at = parse_end(ends, zone) if ends else None
    if starts_at and ends_at and ends_at <= starts_at:
        raise ValueError(f"it ends ({ends}) before it starts ({starts}).")
    return starts_at, ends_at


def parse_start(text: str, zone: str) -> datetime:
    """Return the first moment of a date, or a time. Raises ValueError with a sentence."""
    try:
        return parse_moment(text, zone)
    except ValueError as error:
        raise ValueError(f"the start {error}") from None


def parse_end(text: str, zone: str) -> datetime:
    """Return the first moment after a date, or a time. Raises ValueError with a sentence."""
    try:
        if not _DAY.fullmatch(text):
            return parse_moment(text, zone)
        parse_moment(text, zone)
        after = datetime.fromisoformat(text) + timedelta(days=1)
        return parse_moment(f"{after:%Y-%m-%d}", zone)
    except OverflowError:
        raise ValueError(f"the end {text!r} is too far away: leave it empty for none.") from None
    except ValueError as error:
        raise ValueError(f"the end {error}") from None


def _groups(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in re.split(r"[,;|]", text)]
    found = tuple(dict.fromkeys(name for name in names if name))
    for name in found:
        check_account(group_account(name))
    return found


def _mail(text: str) -> str:
    if text and not _MAIL.fullmatch(text):
        raise ValueError(f"{text[:60]!r} is not a mail address: write it like ada@lab.example.")
    return text


def _twice(found: Sequence[RosterLine]) -> Iterator[Problem]:
    lines: dict[tuple[str, str], int] = {}
    for each in found:
        user, course = each.entry.user, each.entry.course
        earlier = lines.setdefault((user, course), each.number)
        if earlier != each.number:
            of = f" for {course}" if course else ""
            yield Problem(each.number, f"{user} is on line {earlier} already{of}: leave one.")


@dataclass(frozen=True, slots=True)
class RosterVerdict:
    """What the roster says about a name at one moment."""

    member: bool
    groups: frozenset[str] = frozenset()
    """Of all valid entries."""
    until: datetime | None = None
    """When the last of them ends; None if there are none, or without an end."""
    why: str = ""
    """Why they are no member by the roster, to follow "but" or "because"."""


@dataclass(frozen=True, slots=True)
class RosterChange:
    """What an import did to an entry, or would do."""

    number: int
    """The number of the line in the file; 0 for an entry that is not in it."""
    before: RosterEntry | None
    after: RosterEntry

    @property
    def event(self) -> str:
        """``new``, ``changed``, ``ended`` (it is not in the file), or ``same``."""
        if not self.number:
            return "ended"
        if self.before is None:
            return "new"
        return "same" if self.before == self.after else "changed"


@dataclass(frozen=True, slots=True)
class RosterImport:
    """What a file did to the roster, or would do."""

    changes: tuple[RosterChange, ...]
    problems: tuple[Problem, ...]
    """If there are any, nothing was changed."""
    done: bool
    """True if it was written now."""

    def count(self, event: str) -> int:
        """Return how many entries had this event."""
        return sum(change.event == event for change in self.changes)


@dataclass(eq=False)
class RosterService:
    """Maintains the roster."""

    store: Store
    clock: Callable[[], datetime]
    settings: GPURates
    members: MemberService

    def entries(self) -> list[RosterEntry]:
        """Return the whole roster, by name and course, including expired entries."""
        return self.store.run(repository.whole_roster)

    def roster_member(self, user: str, now: datetime | None = None) -> RosterVerdict:
        """Return if a name is on the roster now, with its groups and end, or why it is not."""
        now = now or self.clock()
        entries = self.store.run(lambda connection: repository.roster_of_user(connection, user))
        return self._verdict(entries, now)

    def membership_stops(self, users: Collection[str]) -> dict[str, datetime]:
        """Return when the servers of these users stop because their membership has an end.

        By user: it has ended, or their last entry on the roster ends.
        """
        now, grace, found = self.clock(), self.members.membership_grace, {}
        with self.store.read() as connection:
            for known in repository.memberships_of(connection, users):
                end = known.ended_at
                if end is None and known.by_roster:
                    entries = repository.roster_of_user(connection, known.user)
                    end = self._verdict(entries, now).until
                if end is not None:
                    found[known.user] = end + grace
        return found

    def import_roster(
        self, data: bytes, *, actor: str, dry_run: bool = False, whole: bool = False
    ) -> RosterImport:
        """Import a CSV file, all of it or nothing, or report what that would do.

        ``whole``: the file is complete for its courses, and their entries that are not in it end
        now. Otherwise they stay, because the file may be one course of many.
        """
        now = self.clock()
        listed, problems = parse(data, self.settings.zone)
        if dry_run or problems:
            with self.store.read() as connection:
                changes = _changes(connection, listed, whole, now)
            return RosterImport(changes, tuple(problems), done=False)
        with self.store.write() as connection:
            changes = _changes(connection, listed, whole, now)
            done = RosterImport(changes, (), done=True)
            events = {event: done.count(event) for event in ("new", "changed", "ended")}
            if any(events.values()):
                repository.put_roster(
                    connection, (c.after for c in changes if c.event != "same"), now
                )
                detail = ", ".join(f"{count} {event}" for event, count in events.items() if count)
                note(connection, actor, "roster import", "roster", detail, now)
        return done

    def end_on_roster(
        self, user: str, *, actor: str, reason: str = "", course: str | None = None
    ) -> list[RosterEntry]:
        """End every entry of a name now, or those of a course, and return them.

        The accounting service then ends the membership of somebody who has no other entry. Raises
        InvalidRequest for a name without valid entries.
        """
        now, reason = self.clock(), checked_reason(reason)
        with self.store.write() as connection:
            entries = [
                entry
                for entry in repository.roster_of_user(connection, user)
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
            repository.put_roster(connection, (_ended(entry, now) for entry in ending), now)
            name = ending[0].user
            detail = f"{course}: {reason}".strip(": ") if course else reason
            note(connection, actor, "roster end", f"member:{name}", detail, now)
        return ending

    def see_to_roster(self) -> int:
        """Apply the roster to memberships, and return how many changed.

        Ends memberships that only the roster gave and that are over, and restores those that only
        the roster had ended.
        """
        now = self.clock()
        with self.store.read() as connection:
            found = [
                (known, repository.roster_of_user(connection, known.user))
                for known in repository.to_compare(connection, now)
            ]
        changed = 0
        for known, entries in found:
            said = self._verdict(entries, now)
            if known.ended_at is None and not said.member:
                changed += self.members.membership_ended(
                    known.user, said.why, actor=ACTOR_ACCOUNTING
                )
            elif known.ended_at and known.actor == ACTOR_ACCOUNTING and said.member:
                changed += self.members.membership_returned(
                    known.user, actor=ACTOR_ACCOUNTING, by_roster=True
                )
        return changed

    def _verdict(self, entries: list[RosterEntry], now: datetime) -> RosterVerdict:
        holding = [entry for entry in entries if entry.holds(now)]
        if holding:
            ends = [entry.ends_at for entry in holding]
            known = [end for end in ends if end is not None]
            return RosterVerdict(
                member=True,
                groups=frozenset(group for entry in holding for group in entry.groups),
                until=max(known) if len(known) == len(ends) else None,
            )
        if not entries:
            return RosterVerdict(member=False, why="this name is not on the roster of members")
        coming = [e for e in entries if e.starts_at and e.starts_at > now and not _over(e, now)]
        if coming:
            first = min(coming, key=lambda entry: entry.starts_at or now)
            why = f"{_of(first)} starts on {self._day(first.starts_at)}"
        else:
            last = max(entries, key=lambda entry: entry.ends_at or now)
            why = f"{_of(last)} ended on {self._day(last.ends_at, end=True)}"
        return RosterVerdict(member=False, why=f"the time on the roster{why}")

    def cells(self, entry: RosterEntry) -> dict[str, str]:
        """Return an entry as texts, by the name of the column; empty for what it has not."""
        return {
            "name": entry.user,
            "course": entry.course,
            "groups": ", ".join(entry.groups),
            "starts": self._day(entry.starts_at),
            "ends": self._day(entry.ends_at, end=True),
            "mail": entry.mail,
        }

    def changed_cells(self, before: RosterEntry, after: RosterEntry) -> list[tuple[str, str]]:
        """Return the names of the columns that differ, each with its old text."""
        new = self.cells(after)
        return [(name, old) for name, old in self.cells(before).items() if old != new[name]]

    def _day(self, moment: datetime | None, *, end: bool = False) -> str:
        """Format a time as admins write it, in the zone of ``c.GPURates.zone``.

        A date, with the time of day unless that is midnight. An ``end`` at midnight is shown as the
        day before.
        """
        if moment is None:
            return ""
        local = moment.astimezone(open_zone(self.settings.zone))
        if (local.hour, local.minute, local.second) != (0, 0, 0):
            return f"{local:%Y-%m-%d %H:%M %Z}"
        return f"{local - timedelta(days=1) if end else local:%Y-%m-%d}"


def _changes(
    connection: sa.Connection, listed: Sequence[RosterLine], whole: bool, now: datetime
) -> tuple[RosterChange, ...]:
    known = {(entry.user, entry.course): entry for entry in repository.whole_roster(connection)}
    found = []
    missing = dict(known)
    for each in listed:
        key = (each.entry.user, each.entry.course)
        found.append(RosterChange(each.number, known.get(key), each.entry))
        missing.pop(key, None)
    if whole:  # what is not in the file, of its courses
        courses = {each.entry.course for each in listed}
        for entry in missing.values():
            if entry.course in courses and not _over(entry, now):
                found.append(RosterChange(0, entry, _ended(entry, now)))
    return tuple(found)


def _ended(entry: RosterEntry, now: datetime) -> RosterEntry:
    """Return an ended entry; one that never applied never will."""
    began = entry.starts_at is None or entry.starts_at < now
    return replace(entry, ends_at=now, starts_at=entry.starts_at if began else None)


def _over(entry: RosterEntry, now: datetime) -> bool:
    return entry.ends_at is not None and entry.ends_at <= now


def _of(entry: RosterEntry) -> str:
    return f" ({entry.course})" if entry.course else ""
