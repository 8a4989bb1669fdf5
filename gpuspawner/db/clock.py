"""The clock of all processes on one store: it reads the machine's clocks, and keeps their offset.

See :mod:`gpuspawner.core.clock` for the rules.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa

from ..core import clock
from ..core.clock import ClockVerdict, Offset, Reading, to_datetime
from ..core.errors import ClockWasSet, GPUSpawnerError
from .schema import (
    OPEN_LEASE,
    OPEN_TICKET,
    UNSETTLED,
    clock_offsets,
    closures,
    idle,
    leases,
    sick_leases,
    tickets,
)

if TYPE_CHECKING:
    from .engine import Store


KEPT_EVERY = 10 * clock.SECOND
"""How often it is written that this boot still lasts."""

LOOK_AGAIN = 5.0
"""Seconds between two looks in the store whether another process moved the clock."""

_STEADY = 2_000_000
"""Nanoseconds within which clocks are read at the same moment."""

_SHIFTED = (
    (leases, OPEN_LEASE, "granted_at started_at answered_at seen_at warned_at claimed_at"),
    (tickets, OPEN_TICKET, "created_at"),
    (sick_leases, UNSETTLED, "fault_at told_at"),
    (idle, sa.true(), "judged_until warned_at stops_at"),
    (closures, sa.true(), "at"),
)
"""What is open, and the times of it from which something is still counted."""


class SteadyClock:
    """Tells the time in UTC; see :mod:`gpuspawner.core.clock`. Thread-safe.

    ``read`` reads the machine's clocks; tests put their own in its place.
    """

    def __init__(self, store: Store, read: Callable[[], Reading] | None = None) -> None:
        self._store = store
        self._read = read or read_clocks
        self._offset: Offset | None = None
        self._told = threading.local()
        """The version of the offset by which this thread was told the time last."""
        self._looked_at = 0.0
        self._right_at = 0
        """Time since boot when :meth:`keep` saw last what it had seen before."""

    def __call__(self) -> datetime:
        reading = self._read()
        offset = self._known(reading)
        if abs(reading.wall - offset.at(reading.since_boot)) > clock.TOLERATED:
            self._look_again()
        self._told.version = offset.version
        return to_datetime(offset.at(reading.since_boot))

    @property
    def skew(self) -> timedelta:
        """Wall clock less steady time now."""
        reading = self._read()
        offset = self._known(reading)
        return timedelta(microseconds=reading.wall - offset.at(reading.since_boot))

    def possible_times(self, stamp: datetime) -> list[datetime]:
        """See :func:`gpuspawner.core.clock.possible_times`."""
        reading = self._read()
        return clock.possible_times(stamp, self._known(reading), reading)

    @property
    def stamp_error(self) -> timedelta:
        """See :func:`gpuspawner.core.clock.stamp_error`."""
        reading = self._read()
        return clock.stamp_error(self._known(reading), reading)

    @property
    def offset(self) -> Offset:
        """The offset of this boot, as this process knows it."""
        return self._known(self._read())

    def keep(self, moving: Callable[[sa.Connection, Offset, ClockVerdict], None]) -> ClockVerdict:
        """Compare the clocks, follow what is to be followed, and write that this boot lasts.

        For one process on a store, every few seconds. ``moving`` is called in the transaction that
        moves the clock, with the offset before it. Raises StoreUnavailable.
        """
        reading = self._read()
        known = self._known(reading)
        verdict = clock.judge(known, reading)
        late = reading.since_boot - known.kept_at >= KEPT_EVERY
        if verdict.offset == known and not late:
            self._right_at = reading.since_boot
            return verdict
        with self._store.write() as connection:
            reading = self._read()
            before = self._load(connection, reading)
            before = replace(before, kept_at=max(before.kept_at, self._right_at))
            verdict = clock.judge(before, reading)
            if verdict.shift:
                shift_open(connection, before, verdict)
                moving(connection, before, verdict)
            offset = clock.kept(verdict.offset, reading)
            _save(connection, offset)
        self._offset, self._told.version = offset, offset.version
        return verdict

    def check(self, connection: sa.Connection) -> None:
        """For the begin of a transaction that writes. Raises ClockWasSet when the clock was moved
        since this thread was told the time: it does not fit what is in the store now."""
        reading = self._read()
        offset = self._unchanged(connection, reading)
        if offset is None:
            self._offset = offset = self._load(connection, reading)
        told, self._told.version = getattr(self._told, "version", None), offset.version
        if told not in (None, offset.version):
            raise ClockWasSet()

    def _unchanged(self, connection: sa.Connection, reading: Reading) -> Offset | None:
        """The offset that this process knows, if it is what the store has for this boot."""
        known = self._offset
        if known is None or not _is_of(known, reading):
            return None
        row = connection.execute(_MARKS, {"boot": known.boot_id}).first()
        return known if row == (known.version, known.kept_at, known.step) else None

    def _known(self, reading: Reading) -> Offset:
        """The offset of this boot; from the store the first time."""
        if self._offset is not None and self._offset.boot_id == reading.boot_id:
            return self._offset
        try:
            with self._store.read() as connection:
                found = _find(connection, reading)
                self._offset = found or clock.begin(reading, _last(connection))
        except GPUSpawnerError:  # the store is away: nothing is charged or ended meanwhile
            return clock.begin(reading, None)
        return self._offset

    def _load(self, connection: sa.Connection, reading: Reading) -> Offset:
        """The offset of this boot, written now if it was not."""
        if found := _find(connection, reading):
            return found
        new = self._offset
        if new is None or new.boot_id != reading.boot_id:
            new = clock.begin(reading, _last(connection))
        _save(connection, new)
        return new

    def _look_again(self) -> None:
        """Learn in another thread whether another process moved the clock."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_AGAIN:
            return
        self._looked_at = now

        def look() -> None:
            with self._store.read() as connection:
                found = _find(connection, self._read())
            known = self._offset
            if found and known and found.version > known.version:
                self._offset = found  # what was read meanwhile by others may be newer

        with suppress(RuntimeError):  # the store was closed
            self._store.executor.submit(look)


def shift_open(connection: sa.Connection, offset: Offset, verdict: ClockVerdict) -> None:
    """Move everything open to the new steady time, so that no duration changes but the one for
    which the machine was off. ``offset`` is the one that the verdict was made of."""
    shift, recount = (timedelta(microseconds=x) for x in (verdict.shift, verdict.recount))
    boot = None if offset.before is None else to_datetime(offset.before)

    def moved(at: datetime) -> datetime:
        return at + shift - (recount if boot and at <= boot else timedelta())

    for table, is_open, names in _SHIFTED:
        some = [table.c[name] for name in names.split()]
        primary = list(table.primary_key.columns)
        rows = connection.execute(sa.select(*primary, *some).where(is_open)).all()
        for row in rows:
            this = sa.and_(*(column == row[i] for i, column in enumerate(primary)))
            times = row[len(primary) :]
            new = {c.name: moved(at) for c, at in zip(some, times, strict=True) if at}
            if new:
                connection.execute(sa.update(table).where(this).values(new))


def read_clocks() -> Reading:
    """Read the machine's clocks at the same moment. Linux only."""
    for _ in range(5):
        before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        wall = time.time_ns()
        after = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        if after - before < _STEADY:  # else something else ran in between
            break
    return Reading(wall // 1000, (before + after) // 2000, _boot_id())


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # a sandbox without it: every boot is taken for the same one
        return "unknown"


_NAMES = tuple(Offset.__dataclass_fields__)
_BY_BOOT = sa.select(*(clock_offsets.c[name] for name in _NAMES)).where(
    clock_offsets.c.boot_id == sa.bindparam("boot")
)
_MARKS = sa.select(clock_offsets.c.version, clock_offsets.c.kept_at, clock_offsets.c.step).where(
    clock_offsets.c.boot_id == sa.bindparam("boot")
)
"""What is another number whenever a row is written anew."""
_LAST = sa.select(sa.func.max(clock_offsets.c.offset + clock_offsets.c.kept_at))


def _find(connection: sa.Connection, reading: Reading) -> Offset | None:
    """The offset of this boot; None when the store does not know it.

    A time since boot that is less than it was is another boot, whatever its id says.
    """
    row = connection.execute(_BY_BOOT, {"boot": reading.boot_id}).first()
    found = Offset(*row) if row else None
    return found if found and _is_of(found, reading) else None


def _is_of(offset: Offset, reading: Reading) -> bool:
    """Return True if the offset is of the boot of the reading."""
    is_later = offset.kept_at <= reading.since_boot + clock.MINUTE
    return offset.boot_id == reading.boot_id and is_later


def _last(connection: sa.Connection) -> int | None:
    """The last steady time that is known of any boot."""
    return connection.execute(_LAST).scalar_one()


def _save(connection: sa.Connection, offset: Offset) -> None:
    row = {name: getattr(offset, name) for name in _NAMES}
    connection.execute(sa.delete(clock_offsets).where(clock_offsets.c.boot_id == offset.boot_id))
    connection.execute(sa.insert(clock_offsets).values(row))
