"""Minutes and hours from samples: the same sums, however the time was cut."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from random import Random
from typing import Any

import pytest

from gpuspawner.devices.models import DeviceProcess
from gpuspawner.monitoring.models import (
    HOUR,
    MINUTE,
    MOST_XIDS,
    DeviceUse,
    Rollups,
    Sample,
    beginning,
    combine,
)

T0 = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)
TRAINS = (DeviceProcess(pid=7, used_memory_bytes=2**30),)


def second(number: float, uuid: str = "GPU-a", **fields: Any) -> Sample:
    return Sample(uuid=uuid, index=0, at=T0 + timedelta(seconds=number), **fields)


def rolled(*samples: Sample, rollups: Rollups | None = None) -> list[DeviceUse]:
    rollups = rollups or Rollups()
    done = [use for sample in samples for use in rollups.add([sample])]
    return done + rollups.rest()


def test_minute_rollup_aggregates_use_and_sensors() -> None:
    uses = [80] * 15 + [0] * 45
    shown = [
        {"used_bytes": n * 10, "milliwatts": 100_000 + n, "celsius": 40 + n} for n in range(60)
    ]
    (use,) = rolled(*(second(n, use=uses[n], **shown[n]) for n in range(60)))
    assert (use.since, use.seconds, use.samples, use.known, use.busy) == (T0, MINUTE, 60, 60, 15)
    assert (use.use, use.use_max, use.memory_max, use.celsius_max) == (20.0, 80, 590, 99)
    assert use.watts == pytest.approx(100.0295)
    assert use.judged_by == "use"


def test_rollups_are_split_by_minute_and_device() -> None:
    rollups = Rollups()
    done = []
    for n in range(130):
        done += rollups.add([second(n, use=100), second(n, "GPU-b", use=0)])
    found = [(use.uuid, (use.since - T0).total_seconds(), use.samples) for use in done]
    assert found == [("GPU-a", 0, 60), ("GPU-b", 0, 60), ("GPU-a", 60, 60), ("GPU-b", 60, 60)]
    assert [use.samples for use in rollups.rest()] == [10, 10]
    rollups.add([second(130, use=5), second(130, "GPU-b", use=9)])
    done = rollups.add([second(180, use=5)])
    assert [use.uuid for use in done] == ["GPU-a", "GPU-b"], "also of a device that is gone"


def test_rollup_judges_by_processes_and_skips_silent_seconds() -> None:
    (use,) = rolled(second(0), second(1, processes=()), second(2, processes=TRAINS))
    assert (use.known, use.busy, use.use, use.processes) == (2, 1, None, 1)
    assert use.judged_by == "processes"

    (use,) = rolled(second(0, use=3), second(1, error="It is lost.", xids=(79,)))
    assert (use.samples, use.known, use.busy) == (2, 1, 1)
    assert (use.error, use.xids) == ("It is lost.", (79,))
    (use,) = rolled(second(0, error="It is lost."))
    assert (use.judged_by, use.use) == ("", None)

    rollups = Rollups(is_strange=lambda process: process.pid == 8)
    (use,) = rolled(second(0, processes=(*TRAINS, DeviceProcess(pid=8))), rollups=rollups)
    assert (use.processes, use.strangers) == (2, 1)


def test_rollup_counts_new_ecc_errors_and_limits_xids() -> None:
    rollups = Rollups()
    counts = [7, 7, 9, 0, 2]  # the driver was loaded anew after the third
    found = rolled(*[second(60 * n, ecc_errors=e) for n, e in enumerate(counts)], rollups=rollups)
    assert [use.ecc_errors for use in found] == [0, 0, 2, 0, 2]
    (use,) = rolled(*[second(n / 10, xids=(n, 79)) for n in range(500)])
    assert len(use.xids) == MOST_XIDS
    assert 79 in use.xids
    found = rolled(second(90, use=50), second(30, use=70))
    assert [(use.since, use.use) for use in found] == [(T0 + timedelta(minutes=1), 50), (T0, 70)]


def test_hour_rollup_is_the_same_for_any_partition() -> None:
    random = Random(7)
    minutes = rolled(
        *[
            second(
                n,
                use=random.choice([None, 0, 0, 30, 100]),
                used_bytes=random.randrange(10**9),
                milliwatts=random.choice([None, 50_000]),
                celsius=random.choice([None, 40, 80]),
                throttle=random.choice([0, 4, 0x40]),
                xids=random.choice([(), (), (13,), (79,)]),
                error=random.choice(["", "", "", "lost"]),
            )
            for n in range(3600)
        ]
    )
    assert len(minutes) == 60
    whole = combine(minutes, T0, HOUR)
    assert whole.samples == 3600
    assert whole.known == sum(m.known for m in minutes)
    for cut in (1, 17, 59):
        random.shuffle(minutes)
        early = sorted(minutes, key=lambda m: m.since)[:cut]
        late = [m for m in minutes if m not in early]
        halves = [combine(half, min(m.since for m in half), HOUR) for half in (early, late)]
        assert combine(halves, T0, HOUR) == whole


def test_rollup_periods_are_aligned_and_empty_input_is_rejected() -> None:
    at = T0 + timedelta(hours=1, minutes=59, seconds=59, microseconds=999_999)
    assert beginning(at, MINUTE) == T0 + timedelta(hours=1, minutes=59)
    assert beginning(at, HOUR) == T0 + timedelta(hours=1)
    with pytest.raises(ValueError, match="nothing to combine"):
        combine([], T0, HOUR)
