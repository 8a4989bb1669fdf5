"""The clock of all processes on one store, from the machine's clocks and a stored offset.

See :mod:`gpuspawner.core.clock` for the rules.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Protocol

import sqlalchemy as sa

from ..core import clock
from ..core.clock import ClockVerdict, Offset, Reading, to_datetime
from ..core.errors import ClockWasSet, GPUSpawnerError
from ..core.processes import boot_id
from .schema import (
    OPEN_LEASE,
    OPEN_RUN,
    OPEN_TICKET,
    UNSETTLED,
    clock_offsets,
    closures,
    idle,
    leases,
    mig_changes,
    resource_use,
    runs,
    sick_leases,
    tickets,
)

KEPT_EVERY = 10 * clock.SECOND
"""How often it is recorded that this boot still lasts."""

LOOK_AGAIN = 5.0
"""Seconds between two checks of the store if another process moved the clock."""

_STEADY = 2_000_000
"""Readings within this many nanoseconds count as the same moment."""

_SHIFTED = (
    (
        leases,
        OPEN_LEASE,
        "granted_at started_at answered_at seen_at warned_at claimed_at yields_at",
    ),
    (
        tickets,
        OPEN_TICKET,
        "created_at since estimated_at estimate_low estimate_likely estimate_high",
    ),
    (runs, OPEN_RUN, "created_at"),
    (sick_leases, UNSETTLED, "fault_at told_at"),
    (idle, sa.true(), "judged_until warned_at stops_at"),
    (
        resource_use,
        resource_use.c.lease_id.in_(sa.select(leases.c.id).where(OPEN_LEASE)),
        "sampled_at told_at",
    ),
    (closures, sa.true(), "at"),
    (mig_changes, sa.true(), "started_at stepped_at"),
)
"""What is open, and its times from which something is still counted."""


class ClockStore(Protocol):
    """What the clock needs of a :class:`gpuspawner.db.engine.Store`."""

    executor: ThreadPoolExecutor

    def read(self) -> AbstractContextManager[sa.Connection]:
        """A transaction that reads."""

    def write(self) -> AbstractContextManager[sa.Connection]:
        """A transaction that writes."""


class SteadyClock:
    """The steady time in UTC; tests replace ``read``, which reads the clocks. Thread-safe."""

    def __init__(self, store: ClockStore, read: Callable[[], Reading] | None = None) -> None:
        self._store = store
        self._read = read or read_clocks
        self._offset: Offset | None = None
        self._told = threading.local()
        """The version of the offset in the time that this thread last got."""
        self._looked_at = 0.0
        self._right_at = 0
        """Time since boot when :meth:`keep` last found nothing new."""

    def __call__(self) -> datetime:
        """Return the steady time."""
        reading = self._read()
        offset = self._known(reading)
        if abs(reading.wall - offset.at(reading.since_boot)) > clock.TOLERATED:
            self._look_again()
        self._told.version = offset.version
        return to_datetime(offset.at(reading.since_boot))

    @property
    def skew(self) -> timedelta:
        """Wall clock less steady time, now."""
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
        """Compare the clocks, follow steps if due, and record that this boot lasts.

        For one process per store, every few seconds. ``moving`` is called in the transaction that
        moves the clock, with the previous offset. Raises StoreUnavailable.
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
        """Check the clock at the start of a write transaction.

        Raises ClockWasSet if the clock was moved since this thread got the time, which then does
        not fit the times in the store.
        """
        reading = self._read()
        offset = self._unchanged(connection, reading)
        if offset is None:
            self._offset = offset = self._load(connection, reading)
        told, self._told.version = getattr(self._told, "version", None), offset.version
        if told not in (None, offset.version):
            raise ClockWasSet()

    def _unchanged(self, connection: sa.Connection, reading: Reading) -> Offset | None:
        """Return the known offset if it equals the stored one of this boot, else None."""
        known = self._offset
        if known is None or not _is_of(known, reading):
            return None
        row = connection.execute(_MARKS, {"boot": known.boot_id}).first()
        return known if row == (known.version, known.kept_at, known.step) else None

    def _known(self, reading: Reading) -> Offset:
        """Return the offset of this boot, from the store the first time."""
        if self._offset is not None and self._offset.boot_id == reading.boot_id:
            return self._offset
        try:
            with self._store.read() as connection:
                found = _find(connection, reading)
                self._offset = found or clock.begin(reading, _last(connection))
        except GPUSpawnerError:  # without the store, nothing is charged or ended meanwhile
            return clock.begin(reading, None)
        return self._offset

    def _load(self, connection: sa.Connection, reading: Reading) -> Offset:
        """Return the offset of this boot, and store it if it is new."""
        if found := _find(connection, reading):
            return found
        new = self._offset
        if new is None or new.boot_id != reading.boot_id:
            new = clock.begin(reading, _last(connection))
        _save(connection, new)
        return new

    def _look_again(self) -> None:
        """Check in another thread if another process moved the clock."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_AGAIN:
            return
        self._looked_at = now

        def look() -> None:
            with self._store.read() as connection:
                found = _find(connection, self._read())
            known = self._offset
            if found and known and found.version > known.version:
                self._offset = found  # what others read meanwhile may be newer

        with suppress(RuntimeError):  # the store was closed
            self._store.executor.submit(look)


class Timekeeper:
    """The time of all services of a process: the store's steady clock, or a test's."""

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self.clock = clock

    def __call__(self) -> datetime:
        """Return the time now, in UTC."""
        return self.clock()

    @property
    def steady(self) -> SteadyClock | None:
        """The store's clock; None if a test replaced it."""
        return self.clock if isinstance(self.clock, SteadyClock) else None

    @property
    def skew(self) -> timedelta:
        """Wall clock less this time now; not zero while a step of the wall clock is in doubt."""
        return self.steady.skew if self.steady else timedelta()

    @property
    def stamp_error(self) -> timedelta:
        """The most that an engine's time may be before this time."""
        return self.steady.stamp_error if self.steady else timedelta()

    @property
    def version(self) -> int:
        """Increases whenever times in the store were moved because the clock was set."""
        return self.steady.offset.version if self.steady else 0

    @property
    def step(self) -> timedelta:
        """By how much the wall clock was set, while that is in doubt; else zero."""
        step = self.steady.offset.step if self.steady else 0
        return timedelta(microseconds=step)

    @property
    def last_boot_end(self) -> datetime | None:
        """When the machine was last known to be up before its boot; None if unknown."""
        before = self.steady.offset.before if self.steady else None
        return None if before is None else to_datetime(before)

    def possible_times(self, stamp: datetime | None) -> list[datetime]:
        """Return what an engine's time may be by this clock; empty if the engine gave none."""
        if stamp is None or self.steady is None:
            return [] if stamp is None else [stamp]
        return self.steady.possible_times(stamp)


def shift_open(connection: sa.Connection, offset: Offset, verdict: ClockVerdict) -> None:
    """Move everything open to the new steady time, so that no duration changes.

    Only the duration for which the machine was off may change. ``offset`` is the one that the
    verdict is based on.
    """
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
    return Reading(wall // 1000, (before + after) // 2000, boot_id())


_NAMES = tuple(Offset.__dataclass_fields__)
_BY_BOOT = sa.select(*(clock_offsets.c[name] for name in _NAMES)).where(
    clock_offsets.c.boot_id == sa.bindparam("boot")
)
_MARKS = sa.select(clock_offsets.c.version, clock_offsets.c.kept_at, clock_offsets.c.step).where(
    clock_offsets.c.boot_id == sa.bindparam("boot")
)
"""The columns that change whenever a row is written again."""
_LAST = sa.select(sa.func.max(clock_offsets.c.offset + clock_offsets.c.kept_at))


def _find(connection: sa.Connection, reading: Reading) -> Offset | None:
    """Return this boot's offset if known. A time since boot that decreased is another boot."""
    row = connection.execute(_BY_BOOT, {"boot": reading.boot_id}).first()
    found = Offset(*row) if row else None
    return found if found and _is_of(found, reading) else None


def _is_of(offset: Offset, reading: Reading) -> bool:
    """Return True if the offset is of the boot of the reading."""
    is_later = offset.kept_at <= reading.since_boot + clock.MINUTE
    return offset.boot_id == reading.boot_id and is_later


def _last(connection: sa.Connection) -> int | None:
    """Return the last known steady time of any boot."""
    return connection.execute(_LAST).scalar_one()


def _save(connection: sa.Connection, offset: Offset) -> None:
    row = {name: getattr(offset, name) for name in _NAMES}
    connection.execute(sa.delete(clock_offsets).where(clock_offsets.c.boot_id == offset.boot_id))
    connection.execute(sa.insert(clock_offsets).values(row))
