"""Times in the database: aware, in UTC, to the microsecond."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from sqlalchemy import DateTime, Dialect, TypeDecorator


class UTCDateTime(TypeDecorator[datetime]):
    """An aware time in UTC, to the microsecond, on databases with and without zones."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def bind_processor(self, dialect: Dialect) -> Callable[[datetime | None], Any] | None:
        """What SQLAlchemy writes into SQLite, in a quarter of the time: a lease writes ten."""
        return as_text if dialect.name == "sqlite" else super().bind_processor(dialect)

    def result_processor(self, dialect: Dialect, coltype: Any) -> Callable[[Any], Any] | None:
        """And the same back: a page reads thousands."""
        return from_text if dialect.name == "sqlite" else super().result_processor(dialect, coltype)

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else _in_utc(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            return value.replace(tzinfo=timezone.utc)
        return value.astimezone(timezone.utc)


def as_text(value: datetime | None) -> str | None:
    """As SQLAlchemy's own type for SQLite writes it: ``2026-11-01 12:00:00.000000``."""
    if value is None:
        return None
    if value.tzinfo is not timezone.utc:
        value = _in_utc(value)
    return value.isoformat(" ", "microseconds")[:26]  # without its +00:00


def from_text(value: str | None) -> datetime | None:
    """What :func:`as_text` wrote."""
    return None if value is None else datetime.fromisoformat(value + "+00:00")


def _in_utc(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("times in the store carry a time zone")
    return value.astimezone(timezone.utc)
