"""The roster from a table, as spreadsheets write it. Pure: bytes in, entries and problems out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from ..errors import LedgerError
from ..ledger.bulk import Problem, by_column, cells_of, decoded
from ..ledger.entries import check_account, group_account
from ..ledger.pricing import parse_moment
from ..model import member_account
from ..store.roster import Entry

LONGEST = 200
"""Characters of a name, a course, a group or an address."""

_COLUMNS = {
    "name": "user",
    "member": "user",
    "user": "user",
    "username": "user",
    "login": "user",
    "course": "course",
    "group": "groups",
    "groups": "groups",
    "start": "starts_at",
    "starts": "starts_at",
    "from": "starts_at",
    "end": "ends_at",
    "ends": "ends_at",
    "until": "ends_at",
    "mail": "mail",
    "email": "mail",
    "e-mail": "mail",
}
_WRITE = "write name and, if you like, groups, course, starts, ends, mail"
_MAIL = re.compile(r"[^\s@<>,;]+@[^\s@<>,;]+")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


@dataclass(frozen=True, slots=True)
class Listed:
    """A line of the table."""

    number: int
    """Of the line in the file, from 1."""
    entry: Entry


def parse(data: bytes, zone: str) -> tuple[list[Listed], list[Problem]]:
    """The entries of a file, and what is wrong with it. Days are those of ``zone``."""
    try:
        rows = list(cells_of(decoded(data)))
        columns = _columns(rows)
    except ValueError as error:
        return [], [Problem(0, str(error))]
    found: list[Listed] = []
    problems: list[Problem] = []
    for number, cells in rows[1:]:
        try:
            found.append(Listed(number, _entry(cells, columns, zone)))
        except (ValueError, LedgerError) as error:
            problems.append(Problem(number, str(error)))
    if len(rows) < 2:
        problems.append(Problem(0, "The file names no members."))
    return found, sorted([*problems, *_twice(found)], key=lambda problem: problem.number)


def _columns(rows: Sequence[tuple[int, list[str]]]) -> list[str]:
    """What the columns are, by the first line. Raises ValueError."""
    if not rows:
        return []
    number, first = rows[0]
    names = [_COLUMNS.get(cell.lower(), "") for cell in first]
    if "user" not in names:
        raise ValueError(f"Line {number} has to name the columns: {_WRITE}.")
    for cell, name in zip(first, names, strict=True):
        if not name:
            raise ValueError(
                f"Line {number} has a column {cell[:60]!r} that a roster has not: take it out, or "
                f"{_WRITE}."
            )
        if names.count(name) > 1:
            raise ValueError(
                f"Line {number} has two columns for the same ({cell[:60]!r} is one): take one out."
            )
    return names


def _entry(cells: Sequence[str], columns: Sequence[str], zone: str) -> Entry:
    """Raises ValueError or LedgerError with a sentence."""
    values = by_column(cells, columns, "put a text with commas in quotes.")
    for name, text in values.items():
        if len(text) > (LONGEST * 10 if name == "groups" else LONGEST) or not text.isprintable():
            raise ValueError(f"{text[:40]!r}... is longer than anybody can read, or unreadable.")
    user = values.get("user", "").lower()
    if not user:
        raise ValueError("it names no member.")
    check_account(member_account(user))
    starts_at, ends_at = _times(values, zone)
    return Entry(
        user=user,
        course=values.get("course", ""),
        groups=_groups(values.get("groups", "")),
        mail=_mail(values.get("mail", "")),
        starts_at=starts_at,
        ends_at=ends_at,
    )


def _times(values: Mapping[str, str], zone: str) -> tuple[datetime | None, datetime | None]:
    """From when and until when: a day is meant from its beginning to its end."""
    starts, ends = values.get("starts_at", ""), values.get("ends_at", "")
    starts_at = parse_start(starts, zone) if starts else None
    ends_at = parse_end(ends, zone) if ends else None
    if starts_at and ends_at and ends_at <= starts_at:
        raise ValueError(f"it ends ({ends}) before it starts ({starts}).")
    return starts_at, ends_at


def parse_start(text: str, zone: str) -> datetime:
    """The first moment of a day, or a moment. Raises ValueError with a sentence."""
    try:
        return parse_moment(text, zone)
    except ValueError as error:
        raise ValueError(f"the start {error}") from None


def parse_end(text: str, zone: str) -> datetime:
    """The first moment after a day, or a moment. Raises ValueError with a sentence."""
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
        raise ValueError(f"{text[:60]!r} is no mail address: write it like ada@lab.example.")
    return text


def _twice(found: Sequence[Listed]) -> Iterator[Problem]:
    lines: dict[tuple[str, str], int] = {}
    for each in found:
        key = (each.entry.user, each.entry.course)
        if earlier := lines.get(key):
            of = f" for {each.entry.course}" if each.entry.course else ""
            yield Problem(
                each.number, f"{each.entry.user} is on line {earlier} already{of}: leave one."
            )
        lines.setdefault(key, each.number)
