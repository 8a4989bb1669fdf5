"""Many grants from a CSV file, as spreadsheets write it. Pure: bytes in, rows and problems out.

Columns: ``member`` (or ``account``), ``amount``, maybe ``reason``. The first line may name them.
Without such a line each line has two or three of them, in this order.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..core.errors import LedgerError
from ..core.units import MICRO, format_credits, parse_credits
from .models import check_account, member_account

MOST = 1_000_000_000
"""Credits that one grant may add or remove: more is a typing mistake."""

MOST_BYTES = 4_000_000
"""The maximum size of a file."""

LONGEST_REASON = 300  # characters

_COLUMNS = {
    "member": "account",
    "account": "account",
    "user": "account",
    "username": "account",
    "name": "account",
    "amount": "amount",
    "credits": "amount",
    "reason": "reason",
}
_NUMBER = re.compile(r"[+-]?[0-9]{1,40}(\.[0-9]{0,40})?")


@dataclass(frozen=True, slots=True)
class GrantRow:
    """A line of the table."""

    number: int
    """The number of the line in the file, from 1."""
    account: str
    amount: int
    """Microcredits, above zero."""
    reason: str


@dataclass(frozen=True, slots=True)
class Problem:
    """A line that cannot be granted, and what to do about it; 0 is the file as a whole."""

    number: int
    sentence: str
    remedy: str = ""
    """The field of a grant that allows the line: ``open``, ``again`` or ``reason``."""

    def __str__(self) -> str:
        return f"Line {self.number}: {self.sentence}" if self.number else self.sentence


class NoReason(ValueError):
    """A line has no reason, and none was given for such lines."""


def parse(data: bytes, reason: str) -> tuple[list[GrantRow], list[Problem]]:
    """Parse a file into its lines and problems; ``reason`` is for lines without one."""
    try:
        text = decoded(data)
        rows = list(cells_of(text))
        columns = _columns(rows)
    except ValueError as error:
        return [], [Problem(0, str(error))]
    found: list[GrantRow] = []
    problems: list[Problem] = []
    for number, cells in rows:
        try:
            found.append(_row(number, cells, columns, reason))
        except NoReason as error:
            problems.append(Problem(number, str(error), remedy="reason"))
        except (ValueError, LedgerError) as error:
            problems.append(Problem(number, str(error)))
    if not rows:
        problems.append(Problem(0, "The file has no lines with a member and an amount."))
    return found, sorted(problems + list(_twice(found)), key=lambda problem: problem.number)


def digest(rows: Iterable[GrantRow]) -> str:
    """Return a digest that is equal for the same grants, whatever their format and order."""
    lines = sorted(f"{row.account}\t{row.amount}\t{row.reason}" for row in rows)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def parse_amount(text: str) -> int:
    """Parse an amount as microcredits. Raises ValueError with a sentence."""
    short = repr(text if len(text) <= 40 else text[:40] + "...")
    if re.fullmatch(r"[+-]?[0-9]*,[0-9]+", text):
        raise ValueError(f"the amount {short} has a comma: write it with a point, like 1.5.")
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"the amount {short} is not a number of credits: write it like 12.5.")
    if len(text.partition(".")[2].rstrip("0")) > 6:
        raise ValueError(f"the amount {short} has more than six decimals.")
    amount = parse_credits(text)
    if amount == 0:
        raise ValueError("the amount is 0: nothing would change.")
    if abs(amount) > MOST * MICRO:
        raise ValueError(f"the amount {short} is more than {MOST:,} credits.")
    return amount


def decoded(data: bytes) -> str:
    """Decode a file as spreadsheets write it. Raises ValueError with a sentence."""
    if len(data) > MOST_BYTES:
        raise ValueError(f"The file has more than {MOST_BYTES:,} bytes: send it in parts.")
    wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    try:
        text = data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("The file is not text in UTF-8: save it as CSV in UTF-8.") from None
    if "\0" in text:
        raise ValueError("The file is not text: save it as CSV in UTF-8.")
    return text


def cells_of(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each line that is not empty, with its number. Raises ValueError."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = max(";\t,", key=first.count)
    reader = csv.reader(text.splitlines(), delimiter=delimiter, strict=True)
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise ValueError(f"Line {reader.line_num} is not a line of a CSV file: {error}.") from None


def by_column(cells: Sequence[str], columns: Sequence[str], hint: str) -> dict[str, str]:
    """Return a line's cells by column name.

    Raises ValueError with a sentence that ends in ``hint``, the advice for too many cells.
    """
    cells = list(cells)
    while len(cells) > len(columns) and not cells[-1]:
        cells.pop()  # spreadsheets pad lines
    if len(cells) > len(columns):
        raise ValueError(f"it has {len(cells)} columns, and there are {len(columns)}: {hint}")
    return dict(zip(columns, cells, strict=False))


def _columns(rows: list[tuple[int, list[str]]]) -> list[str]:
    """Return the columns, and remove a line that names them. Raises ValueError."""
    if not rows:
        return []
    _, first = rows[0]
    names = [_COLUMNS.get(cell.lower(), "") for cell in first]
    if "amount" not in names and "account" not in names:
        return ["account", "amount", "reason"]
    if not all(names) or len(set(names)) < len(names) or not {"account", "amount"} <= set(names):
        raise ValueError(
            f"The first line names the columns {', '.join(first)[:100]!r}: write member, amount "
            "and, if you like, reason."
        )
    del rows[0]
    return names


def _row(number: int, cells: Sequence[str], columns: Sequence[str], reason: str) -> GrantRow:
    hint = "an amount is written with a point, like 1.5, and a text with commas in quotes."
    values = by_column(cells, columns, hint)
    if not values.get("account"):
        raise ValueError("it names no member.")
    if not values.get("amount"):
        raise ValueError(f"it has no amount for {values['account'][:60]}.")
    amount = parse_amount(values["amount"])
    if amount < 0:
        raise ValueError(
            f"the amount {format_credits(amount)} is negative: a file can only grant credits. "
            "Deduct from each account separately."
        )
    said = values.get("reason") or reason
    if said.isdigit():
        raise ValueError(
            f"the reason is {said[:40]!r}: is the amount {values['amount']},{said[:40]}? Write it "
            "with a point."
        )
    if not said:
        raise NoReason("it has no reason: say why, for the statement.")
    if len(said) > LONGEST_REASON or not said.isprintable():
        raise ValueError(f"its reason is longer than {LONGEST_REASON} characters, or unreadable.")
    return GrantRow(number, _account(values["account"]), amount, said)


def _account(name: str) -> str:
    named = name.startswith(("member:", "group:"))
    return check_account(name if named else member_account(name))


def _twice(rows: Iterable[GrantRow]) -> Iterator[Problem]:
    lines: dict[str, int] = {}
    for row in rows:
        if earlier := lines.get(row.account):
            yield Problem(
                row.number, f"{row.account} is on line {earlier} already: add them up to one line."
            )
        lines.setdefault(row.account, row.number)
