"""Checking and shortening what people wrote."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from .errors import InvalidRequest

LONGEST_REASON = 300
"""Characters."""


def checked_reason(reason: str, *, needed: bool = False) -> str:
    """Return an admin's reason on one line. Raises InvalidRequest if it is invalid."""
    text = " ".join(reason.split())
    if needed and not text:
        sentence = "The reason is missing: say in a few words why; the member reads it."
        raise InvalidRequest(sentence, field="reason")
    if len(text) > LONGEST_REASON:
        sentence = f"The reason has {len(text)} characters: {LONGEST_REASON} is the most."
        raise InvalidRequest(sentence, field="reason")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise InvalidRequest("The reason has unreadable characters.", field="reason")
    return text


def listing(parts: Iterable[str]) -> str:
    """Join texts as ``A, B and C``, without empty ones."""
    *first, last = [part for part in parts if part]
    return f"{', '.join(first)} and {last}" if first else last


def short_text(value: object) -> str:
    """Shorten an input for use in a sentence."""
    if isinstance(value, int) and abs(value) > 10**40:  # Python refuses to format some
        return "That"
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
