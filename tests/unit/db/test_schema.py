"""Times as SQLite keeps them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from gpuspawner.db.schema import UTCDateTime, as_text

EXACT = datetime(2025, 3, 1, 7, 0, 0, 123456, tzinfo=timezone(timedelta(hours=-5)))


@pytest.mark.parametrize(
    "moment",
    [EXACT, datetime(1, 1, 1, tzinfo=timezone.utc), datetime(9999, 12, 31, tzinfo=timezone.utc)],
)
def test_sqlite_times_match_the_sqlalchemy_format(moment: datetime) -> None:
    """Who reads the database with another program, and what was written before, sees no change."""
    dialect = sqlite.dialect()
    theirs = sa.DateTime().dialect_impl(dialect).bind_processor(dialect)
    ours = UTCDateTime().dialect_impl(dialect).bind_processor(dialect)
    assert theirs is not None and ours is not None
    plain = moment.astimezone(timezone.utc).replace(tzinfo=None)
    assert ours(moment) == theirs(plain) and ours(None) is None
    back = UTCDateTime().dialect_impl(dialect).result_processor(dialect, None)
    assert back is not None and back(None) is None
    read: Any = back(theirs(plain))
    assert read == moment and read.tzinfo is timezone.utc
    assert back("2025-03-01 12:00:00") == datetime(2025, 3, 1, 12, tzinfo=timezone.utc)
    with pytest.raises(ValueError, match="carry a time zone"):
        ours(plain)


def test_each_time_has_its_own_text() -> None:
    """The newest text is kept: another time, or the same one of another zone, comes out right."""
    utc = EXACT.astimezone(timezone.utc)
    for moment in (EXACT, utc, utc, utc + timedelta(microseconds=1), EXACT):
        assert as_text(moment) == moment.astimezone(timezone.utc).isoformat(" ")[:26]
