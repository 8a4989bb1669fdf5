"""Validation of what people and scripts send; each error message names its field."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import Any

from dateutil.parser import isoparse
from tornado import web

from ..core.errors import InvalidRequest, LedgerError, UnknownAccount
from ..core.units import MICRO, format_credits, parse_credits
from ..ledger.models import check_account
from ..ledger.pricing import parse_moment

MOST_CREDITS = 1_000_000_000
"""Maximum credits of one grant; more is probably a typing error."""

MOST_LINES = 500
"""Maximum number of entries in one answer."""

LAST = 2**62
"""Ids of entries are below this number."""

EXACT = r"-?([1-9][0-9]{0,8}(\.[0-9]{1,6})?|0\.(?=[0-9]*[1-9])[0-9]{1,6})"
"""Pattern of an amount that a script sends."""


def invalid(field: str, what: str) -> InvalidRequest:
    """Return the refusal of a field; ``what`` ends a sentence that begins with the field."""
    return InvalidRequest(f"The field {field!r} {what}", field=field)


_EXACT = re.compile(EXACT)
_AMOUNT = re.compile(r"[+-]?[0-9]{1,20}(\.[0-9]+)?")
_KEY = re.compile(r"[0-9A-Za-z_.:-]{1,100}")


def amount_of(text: object, field: str = "amount") -> int:
    """Parse credits such as ``12.5`` or ``-3`` into microcredits. Raises InvalidRequest."""
    if not isinstance(text, str):
        raise invalid(field, 'is not valid: write credits as text, such as "12.5".')
    text = text.strip()
    if not _AMOUNT.fullmatch(text):
        what = "write credits as a decimal number with a point, such as 12.5."
        raise invalid(field, f"is {text[:60]!r}: {what}")
    try:
        amount = parse_credits(text)
    except ValueError:
        what = f"is {text[:60]!r}: credits have six decimals at most."
        raise invalid(field, what) from None
    if amount == 0:
        raise invalid(field, "is 0: nothing would change.")
    if abs(amount) > MOST_CREDITS * MICRO:
        what = f"{MOST_CREDITS} credits is the most of one grant."
        raise invalid(field, f"is {format_credits(amount)}: {what}")
    return amount


def exact_amount(text: object, field: str = "amount") -> int:
    """Parse credits from a script into microcredits. Raises InvalidRequest."""
    amount = amount_of(text, field)
    if not isinstance(text, str) or not _EXACT.fullmatch(text):
        what = 'a decimal number below a thousand million, such as "12.5" or "-0.25".'
        raise invalid(field, f"is {str(text)[:60]!r}: write credits as {what}")
    return amount


def key_of(text: object, field: str = "key") -> str:
    """Return a valid idempotency key. Raises InvalidRequest."""
    if not isinstance(text, str) or not _KEY.fullmatch(text):
        raise invalid(field, "is not valid: write up to 100 letters, digits and _ . : -")
    return text


INSTANT = (
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?"
    r"([Zz]|[+-][0-9]{2}:[0-9]{2})"
)
"""Pattern of a time that a script sends: ISO 8601 with a time zone."""

_INSTANT = re.compile(INSTANT)
_UNWRITABLE = re.compile(r"[\x00\ud800-\udfff]")


def instant_of(text: object, field: str) -> datetime:
    """Parse a time such as ``2027-07-01T00:00:00Z`` and return it in UTC. Raises InvalidRequest."""
    try:
        if not isinstance(text, str) or not _INSTANT.fullmatch(text):
            raise ValueError
        # Fractions are cut to microseconds.
        moment = isoparse(re.sub(r"(\.[0-9]{6})[0-9]+", r"\1", text.upper()))
        return moment.astimezone(timezone.utc)
    except (ValueError, OverflowError):
        what = "write a moment with its zone, such as 2027-07-01T00:00:00Z."
        raise invalid(field, f"is {str(text)[:60]!r}: {what}") from None


def date_of(text: str, field: str, zone: str) -> datetime | None:
    """Parse a date that a person typed, in a time zone; None if empty. Raises InvalidRequest."""
    if not text.strip():
        return None
    try:
        return parse_moment(text.strip().replace("T", " "), zone)
    except ValueError as error:
        raise InvalidRequest(f"The field {field!r}: {error}", field=field) from None


def of_type(value: Any, kind: type, field: str) -> Any:
    """Return ``value`` if it has this type and can be stored. Raises InvalidRequest."""
    if type(value) is kind and not (isinstance(value, str) and _UNWRITABLE.search(value)):
        return value
    what = {str: "text", int: "a whole number", bool: "true or false", list: "a list of texts"}
    raise invalid(field, f"is {what[kind]}.")


def account_of(name: str) -> str:
    """Return the account name from a path. Raises HTTPError 404 if it is not valid."""
    try:
        return check_account(name)
    except LedgerError:
        raise web.HTTPError(404) from UnknownAccount(account=name[:100])


def whole(text: str, field: str, least: int, most: int) -> int:
    """Parse a whole number from a path or query. Raises HTTPError 400."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else -1
    if not least <= number <= most:
        what = f"is not valid: write a whole number from {least} to {most}."
        raise web.HTTPError(400) from invalid(field, what)
    return number


def text_of(text: str, field: str, most: int) -> str:
    """Return text from a query. Raises HTTPError 400 if it is longer than ``most``."""
    if len(text) > most:
        what = f"is not valid: {most} characters is the most."
        raise web.HTTPError(400) from invalid(field, what)
    return text


def one_of(text: str, field: str, choices: tuple[str, ...]) -> str:
    """Return text from a query if it is one of ``choices``. Raises HTTPError 400."""
    if text not in choices:
        what = f"is not valid: write one of {', '.join(choices)}."
        raise web.HTTPError(400) from invalid(field, what)
    return text
