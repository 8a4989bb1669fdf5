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

_EXACT = re.compile(EXACT)
_AMOUNT = re.compile(r"[+-]?[0-9]{1,20}(\.[0-9]+)?")
_KEY = re.compile(r"[0-9A-Za-z_.:-]{1,100}")


def amount_of(text: object, field: str = "amount") -> int:
    """Parse credits such as ``12.5`` into microcredits; a negative amount takes credits back.

    Raises InvalidRequest.
    """
    if not isinstance(text, str):
        raise InvalidRequest(
            f'The field {field!r} is not valid: write credits as text, such as "12.5".', field=field
        )
    text = text.strip()
    if not _AMOUNT.fullmatch(text):
        raise InvalidRequest(
            f"The field {field!r} is {text[:60]!r}: write credits as a decimal number with a "
            "point, such as 12.5.",
            field=field,
        )
    try:
        amount = parse_credits(text)
    except ValueError:
        raise InvalidRequest(
            f"The field {field!r} is {text[:60]!r}: credits have six decimals at the most.",
            field=field,
        ) from None
    if amount == 0:
        raise InvalidRequest(f"The field {field!r} is 0: nothing would change.", field=field)
    if abs(amount) > MOST_CREDITS * MICRO:
        raise InvalidRequest(
            f"The field {field!r} is {format_credits(amount)}: {MOST_CREDITS} credits is the most "
            "of one grant.",
            field=field,
        )
    return amount


def exact_amount(text: object, field: str = "amount") -> int:
    """Parse credits from a script, with up to six decimals, into microcredits.

    Raises InvalidRequest.
    """
    amount = amount_of(text, field)
    if not isinstance(text, str) or not _EXACT.fullmatch(text):
        raise InvalidRequest(
            f"The field {field!r} is {str(text)[:60]!r}: write credits as a decimal number below a "
            'thousand million, such as "12.5" or "-0.25".',
            field=field,
        )
    return amount


def key_of(text: object, field: str = "key") -> str:
    """Return a valid idempotency key. Raises InvalidRequest."""
    if not isinstance(text, str) or not _KEY.fullmatch(text):
        raise InvalidRequest(
            f"The field {field!r} is not valid: write up to 100 letters, digits and _ . : -",
            field=field,
        )
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
        raise InvalidRequest(
            f"The field {field!r} is {str(text)[:60]!r}: write a moment with its zone, such as "
            "2027-07-01T00:00:00Z.",
            field=field,
        ) from None


def date_of(text: str, field: str, zone: str) -> datetime | None:
    """Parse a date that a person typed, in a time zone; None if empty. Raises InvalidRequest."""
    if not text.strip():
        return None
    try:
        return parse_moment(text.strip().replace("T", " "), zone)
    except ValueError as error:
        raise InvalidRequest(f"The field {field!r}: {error}", field=field) from None


def of_type(value: Any, kind: type, field: str) -> Any:
    """Return ``value`` if it has this type and can be stored.

    Raises InvalidRequest.
    """
    if type(value) is kind and not (isinstance(value, str) and _UNWRITABLE.search(value)):
        return value
    what = {str: "text", int: "a whole number", bool: "true or false", list: "a list of texts"}
    raise InvalidRequest(f"The field {field!r} is {what[kind]}.", field=field)


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
        raise web.HTTPError(400) from InvalidRequest(
            f"The field {field!r} is not valid: write a whole number from {least} to {most}.",
            field=field,
        )
    return number


def text_of(text: str, field: str, most: int) -> str:
    """Return text from a query. Raises HTTPError 400 if it is longer than ``most``."""
    if len(text) > most:
        raise web.HTTPError(400) from InvalidRequest(
            f"The field {field!r} is not valid: {most} characters is the most.", field=field
        )
    return text


def one_of(text: str, field: str, choices: tuple[str, ...]) -> str:
    """Return text from a query if it is one of ``choices``. Raises HTTPError 400."""
    if text not in choices:
        raise web.HTTPError(400) from InvalidRequest(
            f"The field {field!r} is not valid: write one of {', '.join(choices)}.", field=field
        )
    return text
