"""What the page of the cluster tells whom, and what is sent to who watches. No parts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from gpuspawner.devices.models import Device, DeviceStatus
from gpuspawner.devices.snapshots import DeviceView
from gpuspawner.leases.models import Lease, LeaseState, ServerRef
from gpuspawner.monitoring.cluster_views import (
    Doing,
    Frame,
    Picture,
    Sight,
    Tile,
    Viewer,
    as_text,
    doing_of,
    holder,
    summary,
    words,
)
from gpuspawner.monitoring.models import DeviceUse, Sample

NOW = datetime(2026, 3, 2, 12, 0, tzinfo=timezone.utc)
GPU = Device(uuid="GPU-1", index=0, model="A100-80GB", memory_bytes=80 * 2**30)


def lease(user: str = "ada", name: str = "training") -> Lease:
    return Lease(
        id="abc123",
        server=ServerRef(user, name),
        account=f"member:{user}",
        environment="",
        devices=(),
        rate=0,
        hold=0,
        state=LeaseState.RUNNING,
        granted_at=NOW - timedelta(hours=2),
        started_at=NOW - timedelta(hours=1),
    )


def tile(
    doing: Doing | None = None, *, state: str = "leased", detail: str = "", held: bool = True
) -> Tile:
    some = lease() if held else None
    return Tile(DeviceView(GPU, state, detail, some.id if some else None), some, doing or Doing())


# Who is told what.


def test_a_name_is_told_to_whom_it_may_be_told() -> None:
    some = tile()
    assert holder(some, Sight.ADMIN) == "ada/training"
    assert holder(some, Sight.NAMES) == "ada"
    assert holder(some, Sight.PLAIN) == "in use"
    assert holder(tile(held=False, state="free"), Sight.ADMIN) == ""
    for sight in (Sight.PLAIN, Sight.NAMES):
        assert "training" not in json.dumps(words(some, sight, NOW))
    assert "abc123" not in json.dumps(words(some, Sight.ADMIN, NOW))


@pytest.mark.parametrize(
    ("some", "member", "admin"),
    [
        (tile(), "", ""),
        (
            tile(Doing(error="GPU is lost (pid 4711).", xids=(79,))),
            "does not answer",
            "does not answer: GPU is lost (pid 4711); Xid 79",
        ),
        (
            tile(Doing(slowed=("too warm (hardware)",), warm=True)),
            "too warm",
            "slowed: too warm (hardware)",
        ),
        (tile(Doing(slowed=("power cap",))), "", "slowed: power cap"),
        (
            tile(
                Doing(silent="the machine gpu2 does not tell what its GPUs do: Connection refused")
            ),
            "its machine does not tell what it does",
            "the machine gpu2 does not tell what its GPUs do: Connection refused",
        ),
        (
            tile(state="draining", detail="lease abc123; drained by kim: a loud fan."),
            "",
            "drained by kim: a loud fan",
        ),
        (
            tile(state="occupied", detail="used without a lease by x (pid 4711)", held=False),
            "",
            "used without a lease by x (pid 4711)",
        ),
    ],
)
def test_what_is_wrong_is_said_in_full_to_admins(some: Tile, member: str, admin: str) -> None:
    assert some.health(Sight.PLAIN) == some.health(Sight.NAMES) == member
    assert some.health(Sight.ADMIN) == admin


def test_a_machine_that_is_off_until_it_is_needed_is_nothing_wrong() -> None:
    off = replace(GPU, reason="off (power saving)")
    silent = Doing(silent="the machine gpu2 is off (power saving)", resting=True)
    some = Tile(DeviceView(off, "free", off.reason), None, silent)
    for sight in Sight:
        told = words(some, sight, NOW)
        assert (told["health"], told["note"]) == ("", "off (power saving)")
    drained = Tile(DeviceView(off, "drained", "off (power saving); drained by kim"), None, silent)
    assert drained.health(Sight.ADMIN) == "off (power saving); drained by kim"
    broken = replace(GPU, status=DeviceStatus.UNKNOWN, reason="the machine gpu2 gets no work")
    assert words(Tile(DeviceView(broken, "unknown", ""), None, silent), sight, NOW)["note"] == ""


# What is known of it.


def test_the_newest_second_counts_before_the_last_minute() -> None:
    minute = DeviceUse(
        uuid="GPU-1", since=NOW, seconds=60, samples=60, known=60, measured=60, use_sum=600
    )
    fresh = Sample(uuid="GPU-1", index=0, at=NOW - timedelta(seconds=2), use=73, celsius=61)
    old = Sample(uuid="GPU-1", index=0, at=NOW - timedelta(minutes=2), use=73)
    assert doing_of([old, fresh], minute, NOW).use == 73
    assert doing_of([old], minute, NOW).use == 10
    assert doing_of([old], None, NOW) == doing_of([], None, NOW) == Doing()
    silent = Sample(uuid="GPU-1", index=0, at=NOW, silent="nobody asked it")
    assert doing_of([fresh, silent], minute, NOW) == Doing(silent="nobody asked it")
    ahead = Sample(uuid="GPU-1", index=0, at=NOW + timedelta(hours=1), use=73)
    assert doing_of([ahead], minute, NOW).use == 10, "the clock was set back"


def test_an_error_is_told_for_some_minutes() -> None:
    """The driver reports it once."""
    ill = Sample(uuid="GPU-1", index=0, at=NOW - timedelta(minutes=3), xids=(79, 13))
    now = Sample(uuid="GPU-1", index=0, at=NOW, use=1, xids=(13,))
    minute = DeviceUse(uuid="GPU-1", since=NOW, seconds=60, xids=(48,))
    assert doing_of([ill, now], minute, NOW).xids == (79, 13, 48)


@pytest.mark.parametrize(
    ("doing", "use", "memory"),
    [
        (Doing(), "not known", "80 GB"),
        (Doing(use=0.4, used_bytes=0), "0 %", "0.0 of 80 GB"),
        (Doing(use=73, used_bytes=13 * 2**29), "73 %", "6.5 of 80 GB"),
        (Doing(busy=True, used_bytes=2**30), "has processes", "1.0 of 80 GB"),
        (Doing(busy=False), "no process", "80 GB"),
        (Doing(use=100, used_bytes=2**50), "100 %", "1048576.0 of 80 GB"),
    ],
)
def test_numbers_as_words(doing: Doing, use: str, memory: str) -> None:
    told = words(tile(doing), Sight.PLAIN, NOW)
    assert (told["use"], told["memory"]) == (use, memory)
    assert 0 <= told["level"] <= 100
    assert 0 <= told["filled"] <= 100


def test_since_when() -> None:
    at = (NOW - timedelta(hours=1)).astimezone()
    assert words(tile(), Sight.PLAIN, NOW)["since"] == f"since {at:%H:%M}"
    later = NOW + timedelta(days=2)
    assert words(tile(), Sight.PLAIN, later)["since"] == f"since {at:%-d %b %H:%M}"
    assert words(tile(held=False, state="free"), Sight.PLAIN, NOW)["since"] == ""


@pytest.mark.parametrize(
    ("waiting", "said"),
    [(0, "nobody waits in line"), (1, "one waits in line"), (7, "7 wait in line")],
)
def test_the_line(waiting: int, said: str) -> None:
    assert summary(Picture(NOW, (), 8, 3, waiting, "")) == f"3 of 8 free, {said}"


# What is sent.


def frame(at: str, text: str = "{}", trouble: str = "", **own: dict[str, str]) -> Frame:
    return Frame(at, {Sight.PLAIN: text}, own, trouble)


def events(text: str | None) -> dict[str, Any]:
    parts = [line for line in (text or "").split("\n") if line]
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return {
        name.removeprefix("event: "): json.loads(data.removeprefix("data: "))
        for name, data in pairs
    }


async def test_what_stays_as_it_was_is_told_once() -> None:
    viewer = Viewer("ada", Sight.PLAIN)
    viewer.offer(frame("12:00:00", '{"a":1}', ada={"GPU-1": "training"}, bob={"GPU-2": "x"}))
    assert events(await viewer.next(5)) == {
        "picture": {"a": 1},
        "mine": {"GPU-1": "yours: training"},
        "trouble": "",
        "time": "12:00:00",
    }
    viewer.offer(frame("12:00:02", '{"a":1}', ada={"GPU-1": "training"}))
    assert events(await viewer.next(5)) == {"time": "12:00:02"}
    viewer.offer(Frame("12:00:04", {}, trouble="The database does not answer."))
    told = events(await viewer.next(5))
    assert told == {"trouble": "The database does not answer.", "time": "12:00:04"}
    viewer.offer(frame("12:00:06", '{"a":1}'))
    assert events(await viewer.next(5)) == {"mine": {}, "trouble": "", "time": "12:00:06"}


async def test_there_is_room_for_one_picture() -> None:
    viewer = Viewer("ada", Sight.PLAIN)
    for number in range(1000):
        viewer.offer(frame(str(number), json.dumps({"number": number})))
    assert events(await viewer.next(5))["picture"] == {"number": 999}
    assert await viewer.next(0.01) is None


async def test_who_is_gone_is_told_nothing_more() -> None:
    viewer = Viewer("ada", Sight.PLAIN)
    waiting = asyncio.ensure_future(viewer.next(60))
    await asyncio.sleep(0)
    viewer.offer(frame("12:00:00"))
    viewer.go()
    assert await waiting is None


def test_a_picture_as_text_is_one_line_without_names() -> None:
    picture = Picture(NOW, (tile(),), 1, 0, 2, "", {"ada": {"GPU-1": "training"}})
    text = as_text(picture, Sight.PLAIN)
    assert "\n" not in text
    assert "ada" not in text and "training" not in text
    assert json.loads(text)["tiles"]["GPU-1"]["who"] == "in use"
    assert json.loads(as_text(picture, Sight.ADMIN))["tiles"]["GPU-1"]["who"] == "ada/training"
